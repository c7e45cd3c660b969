/* The cross of all features of a sample at full width, in bf16, forward and backward:

       h = x V^T,  crossed = x * (h U^T + b) + x,  mixed = crossed M^T + mb,
       out = crossed P^T + pb, feature by feature,  + mixed A^T + ab

   Libraries of products write the gate, the crossed features and the gradients of both to memory, and read them again
   for every product and every elementwise part. Here they exist only for a brick of 32 samples by 32 columns at a time:
   products leave it in the first cache, and the elementwise part makes of it the bricks of the next products. The
   forward pass keeps x, h and mixed; the backward pass has the gate and the crossed features from them once more.

   Gradients of weights and biases are float32 sums over spans of the batch, added up in order: no result depends on the
   number of threads. Plain C with intrinsics; nothing of Python or torch is included. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define CROSSES_VERSION 1 /* cross_kernels.py expects it */
#define GROUP 1           /* bricks of samples that a piece of the forward pass has */
#define SPAN 16           /* bricks of samples that a piece of the backward pass has */
#define ROUND 8           /* bricks of samples whose crossed features are kept for the gradients of weights */
#define AHEAD 4           /* bricks */
#define KEPT (128 << 20)  /* bytes, at most, that a pass leaves to the next one */

typedef struct {
    const uint16_t *x;                       /* bf16 [n, features * width], rows `x_stride` values apart */
    const float *down;                       /* V [rank, features * width] */
    const float *up, *gate_bias;             /* U [features * width, rank], b [features * width] */
    const float *project, *project_bias;     /* P [dim, width], pb [dim] */
    const float *mix, *mix_bias;             /* M [mixtures, features * width], mb [mixtures] */
    const float *spread, *spread_bias;       /* A [features * dim, mixtures], ab [features * dim] */
    uint16_t *h, *mixed, *out;               /* bf16 [n, rank], [n, mixtures], [n, features * dim] */
    const uint16_t *grad;                    /* bf16, as out */
    uint16_t *for_x;                         /* bf16 [n, features * width] */
    float *for_down, *for_up, *for_gate_bias, *for_project, *for_project_bias; /* as what they are for */
    float *for_mix, *for_mix_bias, *for_spread, *for_spread_bias;
    int64_t x_stride, n, features, width, rank, mixtures, dim;
    int32_t threads;
} Cross;

int crosses_version(void) { return CROSSES_VERSION; }

static int allowed = 2;

/* Limit the instruction set: 0 none, 1 AVX512_BF16, 2 AMX as well. */
void crosses_limit(int level) { allowed = level; }

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "kept.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,avx2,prfchw")
#include <immintrin.h>
#include <omp.h>

#include "bricks.h"

/* What all pieces of a pass share: how many bricks there are, and the weights as right matrices. */
typedef struct {
    Cross t;
    void (*product)(const Product *);
    Axis samples, values, vectors, rank, mixtures; /* of x (by feature), out (by feature), h and mixed */
    Axis width, dim;                               /* of a feature's values, and of its vector */
    int64_t wide, each, deep, tall, low, mid;      /* bricks: along values, width, vectors, dim, rank and mixtures */
    char *down, *up, *project, *mix, *spread;      /* forward */
    char *gate, *back_up, *back_down, *back_project, *back_mix, *back_spread;
    float *gate_bias, *mix_bias, *out_bias; /* padded like the bricks */
    int64_t piece_bytes;                    /* memory of a thread */
    char *pieces;
    int64_t spans, gradient_bytes;
    char *gradients; /* of each span */
} Pass;

/* The gradients of a span: blocks of the weights', and sums of columns of the biases'. */
typedef struct {
    float *down, *up, *project, *mix, *spread, *gate_bias, *mix_bias, *out_bias;
} Gradients;

INLINE void product(const Pass *w, Sum first, Sum second, const float *begin, float *into) {
    Product p = {{first, second}, begin, into, 0, SIDE};
    w->product(&p);
}

static const Sum nothing;

/* Where x has the brick of samples i and columns j; `columns`: how many are inside. */
INLINE int64_t place(const Pass *w, int64_t i, int64_t j, int64_t stride, int64_t *columns) {
    return i * SIDE * stride + first_of(w->values, j, columns);
}

INLINE int64_t rows_of(const Pass *w, int64_t i) { return least(SIDE, w->t.n - i * SIDE); }

/* Have the lines of a brick of samples in a cache by the time of their turn: rows lie too far apart for the processor
   to foresee them. What lies behind the last row is never read. */
INLINE void fetch(const uint16_t *from, int64_t stride) {
    for (int64_t r = 0; r < SIDE; r++) _mm_prefetch(from + r * stride, _MM_HINT_T0);
}
INLINE void fetch_to_write(const uint16_t *to, int64_t stride) {
    for (int64_t r = 0; r < SIDE; r++) __builtin_prefetch(to + r * stride, 1);
}

/* Fetch x of samples i, columns j; from the last columns on, of the samples behind them. */
INLINE void fetch_x(const Pass *w, int64_t i, int64_t j) {
    int64_t columns;
    fetch(w->t.x + place(w, i + j / w->wide, j % w->wide, w->t.x_stride, &columns), w->t.x_stride);
}

/* A row of x times a row of a block. */
INLINE __m512i times(__m512i row, const float *block) {
    return rounded(_mm512_mul_ps(half_of(row, 0), _mm512_load_ps(block)),
                   _mm512_mul_ps(half_of(row, 1), _mm512_load_ps(block + 256)));
}

/* x times the gate: the brick of the crossed features. */
INLINE void cross_block(float *gate, const char *x, char *into) {
    for (int64_t r = 0; r < SIDE; r++) set_row(into, r, times(row_at(x, r), half(gate, r, 0)));
}

/* Memory of a piece of the forward pass. */
typedef struct {
    char *x, *crossed, *h, *mixed;
    float *blocks; /* two: the elementwise part of a product comes after the next product */
} Front;

/* Where the out values of the brick of samples i and of brick v of columns are. */
INLINE uint16_t *out_at(const Pass *w, int64_t i, int64_t v, int64_t *columns) {
    return w->t.out + i * SIDE * w->t.features * w->t.dim + first_of(w->vectors, v, columns);
}

/* The out values of the brick of samples i, feature by feature. */
static void front_out(const Pass *w, const Front *k, int64_t i, const char *crossed, const char *mixed) {
    char brick[BRICK] __attribute__((aligned(64)));
    int64_t stride = w->t.features * w->t.dim, columns;
    for (int64_t v = 0; v <= w->deep; v++) {
        if (v < w->deep) {
            const char *project = w->project + v % w->tall * w->each * BRICK;
            Sum own = sum_over(w->width, crossed + v / w->tall * w->each * BRICK, project);
            Sum all = sum_over(w->mixtures, mixed, w->spread + v * w->mid * BRICK);
            product(w, own, all, w->out_bias + v * SIDE, k->blocks + v % 2 * BLOCK);
        }
        if (v + AHEAD < w->deep) fetch_to_write(out_at(w, i, v + AHEAD, &columns), stride);
        if (!v) continue;
        round_block(k->blocks + (v - 1) % 2 * BLOCK, brick);
        uint16_t *out = out_at(w, i, v - 1, &columns);
        write_bf16(brick, out, stride, rows_of(w, i), columns);
    }
}

/* A skinny product of a brick of samples with a whole sample's values, rounded, and kept for the backward pass. */
INLINE void front_narrow(const Pass *w, const Front *k, int64_t i, const char *left, const char *right,
                         const float *begin, Axis axis, char *into, uint16_t *kept) {
    for (int64_t j = 0; j < bricks_along(axis); j++) {
        int64_t columns, column = first_of(axis, j, &columns);
        Sum sum = sum_over(w->values, left, right + j * w->wide * BRICK);
        product(w, sum, nothing, begin ? begin + j * SIDE : NULL, k->blocks);
        round_block(k->blocks, into + j * BRICK);
        write_bf16(into + j * BRICK, kept + i * SIDE * axis.width + column, axis.width, rows_of(w, i), columns);
    }
}

/* The crossed features of `count` bricks of samples; meanwhile, x of those from `next` on is fetched. */
static void front_crossed(const Pass *w, const Front *k, int64_t next, int64_t count) {
    int64_t before = 0; /* where the brick of the product before is */
    for (int64_t step = 0; step <= w->wide * count; step++) {
        int64_t j = step / count, i = step % count, at = (i * w->wide + j) * BRICK;
        if (step < w->wide * count) {
            Sum gate = sum_over(w->rank, k->h + i * w->low * BRICK, w->up + j * w->low * BRICK);
            product(w, gate, nothing, w->gate_bias + j * SIDE, k->blocks + step % 2 * BLOCK);
            fetch_x(w, next + i, j);
        }
        if (step) cross_block(k->blocks + (step - 1) % 2 * BLOCK, k->x + before, k->crossed + before);
        before = at;
    }
}

/* Bricks of samples [first, last). */
static void front_piece(const Pass *w, const Front *k, int64_t first, int64_t last) {
    const Cross *t = &w->t;
    int64_t x_bytes = w->wide * BRICK, h_bytes = w->low * BRICK, mixed_bytes = w->mid * BRICK;
    for (int64_t i = first; i < last; i++) {
        char *x = k->x + (i - first) * x_bytes;
        for (int64_t j = 0; j < w->wide; j++) {
            int64_t columns, at = place(w, i, j, t->x_stride, &columns);
            fetch_x(w, i, j + AHEAD);
            read_bf16(t->x + at, t->x_stride, rows_of(w, i), columns, x + j * BRICK);
        }
        front_narrow(w, k, i, x, w->down, NULL, w->rank, k->h + (i - first) * h_bytes, t->h);
    }
    front_crossed(w, k, last, last - first);
    for (int64_t i = 0; i < last - first; i++) {
        char *crossed = k->crossed + i * x_bytes, *mixed = k->mixed + i * mixed_bytes;
        front_narrow(w, k, first + i, crossed, w->mix, w->mix_bias, w->mixtures, mixed, t->mixed);
        front_out(w, k, first + i, crossed, mixed);
    }
}

#include "back.h"

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16")

/* Registers of tiles: four sums, two tiles of the left brick (rows), two of the right (columns). */
static void tiles_product(const Product *p) {
    if (p->begin) {
        _tile_loadd(0, p->begin, 0);
        _tile_loadd(1, p->begin + 16, 0);
        _tile_loadd(2, p->begin, 0);
        _tile_loadd(3, p->begin + 16, 0);
    } else if (p->add) {
        _tile_loadd(0, p->into, 64);
        _tile_loadd(1, p->into + 256, 64);
        _tile_loadd(2, p->into + 512, 64);
        _tile_loadd(3, p->into + 768, 64);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int term = 0; term < 2; term++) {
        const char *left = p->terms[term].left, *right = p->terms[term].right;
        for (int64_t brick = 0; brick < p->terms[term].bricks; brick++, left += BRICK, right += BRICK) {
            _tile_loadd(4, left, 64);
            _tile_loadd(6, right, 64);
            _tile_loadd(7, right + TILE, 64);
            _tile_loadd(5, left + TILE, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, p->into, 64);
    _tile_stored(1, p->into + 256, 64);
    _tile_stored(2, p->into + 512, 64);
    _tile_stored(3, p->into + 768, 64);
}

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} __attribute__((aligned(64))) Tiles;

/* Have eight tiles of 16 lines of 64 bytes. Other libraries keep a configuration between their calls: `before`. */
static void tiles_begin(Tiles *before) {
    static const Tiles all = {.palette = 1, .row_bytes = {[0 ... 7] = 64}, .rows = {[0 ... 7] = 16}};
    _tile_storeconfig(before);
    _tile_loadconfig(&all);
}

static void tiles_end(const Tiles *before) {
    if (before->palette)
        _tile_loadconfig(before);
    else
        _tile_release();
}

#pragma GCC pop_options
#pragma GCC pop_options

#define TILE_STATE 18      /* of the registers' state, as the kernel counts them */
#define REQUEST_STATE 0x1023 /* ARCH_REQ_XCOMP_PERM */

/* Whether the CPU has tiles of bf16, and the kernel lets this process use them. */
static int has_tiles(void) {
    static int known = -1;
    if (known < 0) {
        unsigned a, b, c, d = 0;
        int here = __get_cpuid_count(7, 0, &a, &b, &c, &d) && d >> 22 & 1 && d >> 24 & 1;
        known = here && !syscall(SYS_arch_prctl, REQUEST_STATE, TILE_STATE);
    }
    return known;
}

/* The best instruction set: 2 AMX, 1 AVX512_BF16, 0 neither. */
int crosses_level(void) {
    __builtin_cpu_init();
    if (allowed < 1 || !__builtin_cpu_supports("avx512bf16") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return 0;
    return allowed > 1 && has_tiles() ? 2 : 1;
}

static Pass pass_of(const Cross *t) {
    Pass w = {.t = *t, .product = crosses_level() == 2 ? tiles_product : dots_product};
    w.samples = (Axis){1, t->n}, w.values = (Axis){t->features, t->width}, w.vectors = (Axis){t->features, t->dim};
    w.rank = (Axis){1, t->rank}, w.mixtures = (Axis){1, t->mixtures};
    w.width = (Axis){1, t->width}, w.dim = (Axis){1, t->dim};
    w.wide = bricks_along(w.values), w.each = bricks_of(t->width), w.deep = bricks_along(w.vectors);
    w.tall = bricks_of(t->dim), w.low = bricks_of(t->rank), w.mid = bricks_of(t->mixtures);
    return w;
}

static Matrix down_of(const Pass *w, const float *at) { return (Matrix){at, w->rank, w->values}; }
static Matrix up_of(const Pass *w, const float *at) { return (Matrix){at, w->values, w->rank}; }
static Matrix project_of(const Pass *w, const float *at) { return (Matrix){at, w->dim, w->width}; }
static Matrix mix_of(const Pass *w, const float *at) { return (Matrix){at, w->mixtures, w->values}; }
static Matrix spread_of(const Pass *w, const float *at) { return (Matrix){at, w->vectors, w->mixtures}; }

/* Divide the memory that both passes have: returns how many bytes of it. */
static int64_t divide_weights(Pass *w, char *memory, int back) {
    int64_t used = 0, narrow = w->wide * w->low * BRICK, mixed = w->wide * w->mid * BRICK;
    int64_t project = w->tall * w->each * BRICK, spread = w->deep * w->mid * BRICK;
    w->up = w->gate = room(memory, &used, narrow), w->down = w->back_down = room(memory, &used, narrow);
    w->mix = w->back_mix = room(memory, &used, mixed), w->project = w->back_project = room(memory, &used, project);
    w->spread = w->back_spread = room(memory, &used, spread);
    if (back) w->back_up = room(memory, &used, narrow);
    w->gate_bias = room(memory, &used, 4 * SIDE * w->wide);
    w->mix_bias = room(memory, &used, 4 * SIDE * w->mid), w->out_bias = room(memory, &used, 4 * SIDE * w->deep);
    return used;
}

/* Lay out a weight, by all threads of a team. */
static void pack_all(const Matrix *m, int turned, char *into) {
    int64_t bricks = bricks_along(m->rows) * bricks_along(m->columns);
#pragma omp for schedule(static) nowait
    for (int64_t at = 0; at < bricks; at++) pack(m, turned, at, into);
}

static void pack_weights(const Pass *w, int back) {
    const Cross *t = &w->t;
    Matrix down = down_of(w, t->down), up = up_of(w, t->up), project = project_of(w, t->project);
    Matrix mix = mix_of(w, t->mix), spread = spread_of(w, t->spread);
    pack_all(&up, 1, w->up);
    pack_all(&down, !back, w->down);
    pack_all(&mix, !back, w->mix);
    pack_all(&project, !back, w->project);
    pack_all(&spread, !back, w->spread);
    if (back) pack_all(&up, 0, w->back_up);
#pragma omp barrier
}

/* Lay out the biases like the bricks; the gate's has the 1 that lets x through. */
static void pack_biases(const Pass *w) {
    const Cross *t = &w->t;
    memset(w->gate_bias, 0, 4 * SIDE * w->wide);
    memset(w->mix_bias, 0, 4 * SIDE * w->mid);
    memset(w->out_bias, 0, 4 * SIDE * w->deep);
    for (int64_t f = 0; f < t->features; f++) {
        float *gate = w->gate_bias + f * w->each * SIDE, *out = w->out_bias + f * w->tall * SIDE;
        for (int64_t j = 0; j < t->width; j++) gate[slot(j)] = t->gate_bias[f * t->width + j] + 1.0f;
        for (int64_t d = 0; d < t->dim; d++)
            out[slot(d)] = t->project_bias[d] + t->spread_bias[f * t->dim + d];
    }
    for (int64_t s = 0; s < t->mixtures; s++) w->mix_bias[slot(s)] = t->mix_bias[s];
}

static int64_t divide_front(const Pass *w, Front *k, char *memory) {
    int64_t used = 0;
    k->x = room(memory, &used, GROUP * w->wide * BRICK), k->crossed = room(memory, &used, GROUP * w->wide * BRICK);
    k->h = room(memory, &used, GROUP * w->low * BRICK), k->mixed = room(memory, &used, GROUP * w->mid * BRICK);
    k->blocks = room(memory, &used, 2 * 4 * BLOCK);
    return used;
}

/* Fill h, mixed and out; -1 where there is no memory. */
int crosses_forward(const Cross *task) {
    Pass w = pass_of(task);
    Front none;
    int64_t weights = divide_weights(&w, NULL, 0), each = divide_front(&w, &none, NULL);
    int64_t bytes = weights + each * task->threads, bricks = bricks_of(task->n);
    char *memory = borrow(bytes);
    if (!memory) return -1;
    divide_weights(&w, memory, 0);
    pack_biases(&w);
#pragma omp parallel num_threads(task->threads)
    {
        Front k;
        Tiles before;
        divide_front(&w, &k, memory + weights + omp_get_thread_num() * each);
        if (w.product == tiles_product) tiles_begin(&before);
        pack_weights(&w, 0);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < bricks; i += GROUP) front_piece(&w, &k, i, least(i + GROUP, bricks));
        if (w.product == tiles_product) tiles_end(&before);
    }
    give_back(memory, bytes);
    return 0;
}

static int64_t divide_back(const Pass *w, Back *k, char *memory) {
    int64_t used = 0, grad = SPAN * w->deep * BRICK, h = SPAN * w->low * BRICK, mixed = SPAN * w->mid * BRICK;
    int64_t each = ROUND * w->each * BRICK;
    k->grad = room(memory, &used, grad), k->grad_turned = room(memory, &used, grad);
    k->h = room(memory, &used, h), k->h_turned = room(memory, &used, h);
    k->for_h = room(memory, &used, h), k->for_h_turned = room(memory, &used, h);
    k->mixed = room(memory, &used, mixed), k->for_mixed = room(memory, &used, mixed);
    k->for_mixed_turned = room(memory, &used, mixed), k->for_gate = room(memory, &used, w->wide * BRICK);
    k->for_crossed = room(memory, &used, SPAN * w->wide * BRICK);
    k->crossed = room(memory, &used, each), k->gates = room(memory, &used, each);
    k->x = room(memory, &used, each), k->blocks = room(memory, &used, 2 * 2 * 4 * BLOCK);
    return used;
}

static int64_t divide_gradients(const Pass *w, Gradients *g, char *memory) {
    int64_t used = 0, narrow = 4 * BLOCK * w->wide * w->low;
    g->down = room(memory, &used, narrow), g->up = room(memory, &used, narrow);
    g->mix = room(memory, &used, 4 * BLOCK * w->wide * w->mid);
    g->project = room(memory, &used, 4 * BLOCK * w->tall * w->each);
    g->spread = room(memory, &used, 4 * BLOCK * w->deep * w->mid);
    g->gate_bias = room(memory, &used, 4 * SIDE * w->wide), g->mix_bias = room(memory, &used, 4 * SIDE * w->mid);
    g->out_bias = room(memory, &used, 4 * SIDE * w->deep);
    return used;
}

/* A gradient from the blocks of all spans, by all threads of a team. Blocks of one column follow each other. */
static void collect_all(const Pass *w, const float *blocks, Matrix m, int turned) {
    int64_t down = bricks_along(turned ? m.columns : m.rows), all = down * bricks_along(turned ? m.rows : m.columns);
#pragma omp for schedule(static) nowait
    for (int64_t at = 0; at < all; at++) {
        int64_t inner = at % down, outer = at / down;
        collect(w, blocks + at * BLOCK, &m, turned ? outer : inner, turned ? inner : outer, turned);
    }
}

/* The sum over the spans of a value. */
static float over_spans(const Pass *w, const float *first) {
    float sum = *first;
    for (int64_t s = 1; s < w->spans; s++) sum += *(const float *)((const char *)first + s * w->gradient_bytes);
    return sum;
}

static void collect_biases(const Pass *w, const Gradients *g) {
    const Cross *t = &w->t;
    memset(t->for_project_bias, 0, 4 * t->dim);
    for (int64_t f = 0; f < t->features; f++) {
        for (int64_t j = 0; j < t->width; j++)
            t->for_gate_bias[f * t->width + j] = over_spans(w, g->gate_bias + f * w->each * SIDE + slot(j));
        for (int64_t d = 0; d < t->dim; d++) {
            float sum = over_spans(w, g->out_bias + f * w->tall * SIDE + slot(d));
            t->for_spread_bias[f * t->dim + d] = sum;
            t->for_project_bias[d] += sum;
        }
    }
    for (int64_t s = 0; s < t->mixtures; s++) t->for_mix_bias[s] = over_spans(w, g->mix_bias + slot(s));
}

static void collect_gradients(const Pass *w) {
    const Cross *t = &w->t;
    Gradients g;
    divide_gradients(w, &g, w->gradients);
    collect_all(w, g.down, down_of(w, t->for_down), 0);
    collect_all(w, g.up, up_of(w, t->for_up), 1);
    collect_all(w, g.project, project_of(w, t->for_project), 0);
    collect_all(w, g.mix, mix_of(w, t->for_mix), 0);
    collect_all(w, g.spread, spread_of(w, t->for_spread), 0);
#pragma omp single
    collect_biases(w, &g);
}

/* Fill the gradients; -1 where there is no memory. */
int crosses_backward(const Cross *task) {
    Pass w = pass_of(task);
    Back none;
    int64_t bricks = bricks_of(task->n), weights = divide_weights(&w, NULL, 1), each = divide_back(&w, &none, NULL);
    w.spans = bricks ? (bricks + SPAN - 1) / SPAN : 1;
    w.gradient_bytes = divide_gradients(&w, &none.into, NULL);
    int64_t bytes = weights + each * task->threads + w.gradient_bytes * w.spans;
    char *memory = borrow(bytes);
    if (!memory) return -1;
    divide_weights(&w, memory, 1);
    w.gradients = memory + weights + each * task->threads;
    pack_biases(&w);
#pragma omp parallel num_threads(task->threads)
    {
        Back k;
        Tiles before;
        divide_back(&w, &k, memory + weights + omp_get_thread_num() * each);
        if (w.product == tiles_product) tiles_begin(&before);
        pack_weights(&w, 1);
#pragma omp for schedule(dynamic, 1)
        for (int64_t s = 0; s < w.spans; s++) {
            divide_gradients(&w, &k.into, w.gradients + s * w.gradient_bytes);
            k.first = s * SPAN, k.count = least(SPAN, bricks - k.first);
            back_span(&w, &k);
        }
        if (w.product == tiles_product) tiles_end(&before);
        collect_gradients(&w);
    }
    give_back(memory, bytes);
    return 0;
}

#else

int crosses_level(void) { return 0; }
int crosses_forward(const Cross *task) { return (void)task, -1; }
int crosses_backward(const Cross *task) { return (void)task, -1; }

#endif
