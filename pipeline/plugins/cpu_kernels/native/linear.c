/* A linear layer on a CPU with AVX-512, in float32 or bf16: x @ weight.T + bias with ReLU, and its backward pass.

   Libraries of products do each of these in several passes over memory: they round weights and gradients to bf16 and
   back, lay out the weights anew in every product, and leave bias, ReLU and their gradients to others. Here the weights
   stay in float32 and are laid out while they are rounded, the epilogue of a product does the rest, and the gradients
   of weights and biases are sums in float32.

   All products work on cells of four bytes: one float32, or two bf16 that are neighbours in the direction of the sum. A
   tile is ROWS rows by up to VECS vectors of 16 columns, whose sums stay in registers. No result depends on the number
   of threads. Plain C with intrinsics; nothing of Python or torch is included. */

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LINEAR_VERSION 2 /* linear_kernels.py expects it */
#define ROWS 8
#define VECS 3
#define COLUMNS (16 * VECS) /* of a panel */
#define DEEP 256            /* cells of a block of the sum over a batch, which stays in the caches */
#define TILE (DEEP * ROWS * 4 + 64) /* no power of two: their lines would share a few sets of the cache */
#define PANEL (DEEP * COLUMNS * 4 + 64)
#define UNIT 32             /* cells that a thread lays out at a time */
#define GROUP 8             /* tiles of a piece of work */
#define AHEAD 8             /* rows to look ahead, so that they are in the cache when it is their turn */
#define SPANS 8             /* of a batch, at most: see Back */
#define SPAN_BYTES (32 << 20) /* of the gradients of all spans */
#define KEPT (64 << 20)     /* bytes, at most, that a pass leaves to the next one */

typedef struct {
    const void *x;       /* [n, in], rows `x_stride` values apart: float32 or bf16, as are out, grad, for_x */
    const float *weight; /* [width, in] */
    const float *bias;   /* [width]; NULL: none */
    void *out;           /* [n, width]; in the backward pass NULL where there is no ReLU */
    const void *grad;    /* [n, width] */
    void *for_x;         /* [n, in]; NULL: not wanted */
    float *for_weight;   /* [width, in] */
    float *for_bias;     /* [width] */
    int64_t n, in, width, x_stride;
    int32_t relu, bf16, threads;
} Linear;

int linear_version(void) { return LINEAR_VERSION; }

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#include "kept.h"

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,avx2")
#include <immintrin.h>
#include <omp.h>

#include "products.h"

/* A block of the batch, laid out for the gradient of the weight, whose sum runs over samples. */
typedef struct {
    const Linear *t;
    char *a;          /* tiles of the gradient, TILE bytes apart: [DEEP][ROWS] cells each */
    char *b;          /* panels of x, PANEL bytes apart: [DEEP][vecs][16] cells each */
    float *sums;      /* of the gradient's columns, one row for each UNIT of the batch, rows `wide` apart */
    float *into;      /* [width, in]: what the block's part of the gradient of the weight is added to */
    int64_t wide;
    int64_t cell, count; /* the block's first cell in the batch, and its cells */
    int first;           /* whether `into` has no value yet */
} Block;

/* The cells of 32 columns of two rows of bf16, which are neighbours in the direction of the sum. */
INLINE void pair(__m512i one, __m512i two, __m512i cells[2]) {
    const __m512i first = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                                           37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    cells[0] = _mm512_permutex2var_epi16(one, first, two);
    cells[1] = _mm512_permutex2var_epi16(one, _mm512_add_epi16(first, _mm512_set1_epi16(16)), two);
}

INLINE __mmask32 lanes32(int64_t columns) { return columns >= 32 ? ~0u : columns <= 0 ? 0 : (1u << columns) - 1; }

INLINE void ahead(const void *row, int64_t bytes) { _mm_prefetch((const char *)row + AHEAD * bytes, _MM_HINT_T0); }

/* 32 values of the gradient behind the ReLU, whose output is 0 or above, or NaN, which keeps the gradient. */
INLINE __m512i masked_bf16(const Linear *t, int64_t at, __mmask32 here) {
    ahead((const uint16_t *)t->grad + at, 2 * t->width);
    if (t->out) ahead((const uint16_t *)t->out + at, 2 * t->width);
    if (t->out)
        here = _mm512_mask_test_epi16_mask(here, _mm512_maskz_loadu_epi16(here, (const uint16_t *)t->out + at),
                                           _mm512_set1_epi16(0x7fff));
    return _mm512_maskz_loadu_epi16(here, (const uint16_t *)t->grad + at);
}

INLINE __m512 masked_float(const Linear *t, int64_t at, __mmask16 here) {
    ahead((const float *)t->grad + at, 4 * t->width);
    if (t->out) ahead((const float *)t->out + at, 4 * t->width);
    if (t->out)
        here = _mm512_mask_test_epi32_mask(here, _mm512_maskz_loadu_epi32(here, (const float *)t->out + at),
                                           _mm512_set1_epi32(0x7fffffff));
    return _mm512_maskz_loadu_ps(here, (const float *)t->grad + at);
}

INLINE void store_cells(char *to, __m512i cells) {
    _mm256_store_si256((__m256i *)to, _mm512_castsi512_si256(cells));
    _mm256_store_si256((__m256i *)(to + TILE), _mm512_extracti64x4_epi64(cells, 1));
}

/* Cells [low, high) of the block: the gradient behind the ReLU, in tiles and, where there is room, as rows; and the sums
   of its columns. */
static void gradient_bf16(const Block *k, int64_t low, int64_t high, uint16_t *masked) {
    const Linear *t = k->t;
    const __m512i upper = _mm512_set1_epi32(0xffff0000);
    float *sums = k->sums + (k->cell + low) / UNIT * k->wide;
    for (int64_t c = low; c < high; c++) {
        int64_t row = (k->cell + c) * 2;
        char *to = k->a + c * ROWS * 4;
        for (int64_t column = 0; column < k->wide; column += 32, to += 4 * TILE) {
            __mmask32 here = lanes32(t->width - column);
            int64_t at = row * t->width + column;
            __m512i one = masked_bf16(t, at, here), two = masked_bf16(t, at + t->width, row + 1 < t->n ? here : 0), cells[2];
            if (masked) {
                uint16_t *into = masked + 2 * (c - low) * t->width + column;
                _mm512_mask_storeu_epi16(into, here, one);
                _mm512_mask_storeu_epi16(into + t->width, here, two);
            }
            pair(one, two, cells);
            for (int64_t h = 0; h < 2 && column + 16 * h < k->wide; h++) {
                float *into = sums + column + 16 * h;
                __m512 sum = c > low ? _mm512_loadu_ps(into) : _mm512_setzero_ps();
                sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(cells[h], 16)));
                sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_and_si512(cells[h], upper)));
                _mm512_storeu_ps(into, sum);
                store_cells(to + 2 * h * TILE, cells[h]);
            }
        }
    }
}

static void gradient_float(const Block *k, int64_t low, int64_t high, float *masked) {
    const Linear *t = k->t;
    float *sums = k->sums + (k->cell + low) / UNIT * k->wide;
    for (int64_t c = low; c < high; c++) {
        char *to = k->a + c * ROWS * 4;
        for (int64_t column = 0; column < k->wide; column += 16, to += 2 * TILE) {
            __mmask16 here = lanes(t->width - column);
            __m512 g = masked_float(t, (k->cell + c) * t->width + column, here);
            if (masked) _mm512_mask_storeu_ps(masked + (c - low) * t->width + column, here, g);
            __m512 sum = c > low ? _mm512_loadu_ps(sums + column) : _mm512_setzero_ps();
            _mm512_storeu_ps(sums + column, _mm512_add_ps(sum, g));
            store_cells(to, _mm512_castps_si512(g));
        }
    }
}

/* Cells [low, high) of the block: x in panels. */
static void inputs_bf16(const Block *k, int64_t low, int64_t high) {
    const Linear *t = k->t;
    const uint16_t *x = t->x;
    for (int64_t c = low; c < high; c++) {
        int64_t row = (k->cell + c) * 2;
        for (int64_t column = 0; column < t->in; column += COLUMNS) {
            int64_t vecs = panel_vecs(t->in, column);
            char *to = k->b + column / COLUMNS * PANEL + c * vecs * 64;
            for (int64_t v = 0; v < vecs; v += 2) {
                int64_t at = row * t->x_stride + column + 16 * v;
                __mmask32 here = lanes32(t->in - column - 16 * v) & (v + 1 < vecs ? ~0u : 0xffff);
                __m512i cells[2];
                ahead(x + at, 2 * t->x_stride), ahead(x + at + t->x_stride, 2 * t->x_stride);
                pair(_mm512_maskz_loadu_epi16(here, x + at),
                     _mm512_maskz_loadu_epi16(row + 1 < t->n ? here : 0, x + at + t->x_stride), cells);
                _mm512_store_si512(to + 64 * v, cells[0]);
                if (v + 1 < vecs) _mm512_store_si512(to + 64 * v + 64, cells[1]);
            }
        }
    }
}

static void inputs_float(const Block *k, int64_t low, int64_t high) {
    const Linear *t = k->t;
    for (int64_t c = low; c < high; c++)
        for (int64_t column = 0; column < t->in; column += COLUMNS) {
            int64_t vecs = panel_vecs(t->in, column);
            char *to = k->b + column / COLUMNS * PANEL + c * vecs * 64;
            const float *from = (const float *)t->x + (k->cell + c) * t->x_stride + column;
            for (int64_t v = 0; v < vecs; v++) {
                ahead(from + 16 * v, 4 * t->x_stride);
                _mm512_store_ps(to + 64 * v, _mm512_maskz_loadu_ps(lanes(t->in - column - 16 * v), from + 16 * v));
            }
        }
}

INLINE void weight_panel(const Block *k, int64_t output, int64_t column, const int vecs, const int bf16) {
    const Linear *t = k->t;
    Operands o = {.a_step = ROWS * 4, .b = k->b + column / COLUMNS * PANEL, .steps = k->count};
    for (int64_t r = 0; r < ROWS; r++) o.a[r] = k->a + output / ROWS * TILE + 4 * r;
    int64_t rows = t->width - output < ROWS ? t->width - output : ROWS;
    __m512 sums[ROWS][VECS];
    float *into = k->into + output * t->in + column;
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vecs; v++) {
            sums[r][v] = _mm512_setzero_ps();
            if (r < rows) __builtin_prefetch(into + r * t->in + 16 * v, 1);
        }
    multiply(&o, sums, vecs, bf16);
    for (int r = 0; r < ROWS && r < rows; r++)
        for (int v = 0; v < vecs; v++) {
            __mmask16 mask = lanes(t->in - column - 16 * v);
            float *to = into + r * t->in + 16 * v;
            __m512 before = k->first ? _mm512_setzero_ps() : _mm512_maskz_loadu_ps(mask, to);
            _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(before, sums[r][v]));
        }
}

/* Add the block's part to rows [output, output + ROWS * GROUP) of the gradient of the weight, in a panel of columns. */
INLINE void weight_piece(const Block *k, int64_t output, int64_t column, const int bf16) {
    int64_t vecs = panel_vecs(k->t->in, column);
    for (int64_t i = 0; i < GROUP && output < k->t->width; i++, output += ROWS) {
        if (vecs == 3)
            weight_panel(k, output, column, 3, bf16);
        else if (vecs == 2)
            weight_panel(k, output, column, 2, bf16);
        else
            weight_panel(k, output, column, 1, bf16);
    }
}

/* Add to the n values `into` those of `count` others, `apart` values from one to the next, in their order. */
static void add_up(float *into, const float *others, int64_t n, int64_t count, int64_t apart) {
    for (int64_t at = 0; at < n; at += 16) {
        __mmask16 mask = lanes(n - at);
        __m512 sum = _mm512_maskz_loadu_ps(mask, into + at);
        for (int64_t i = 0; i < count; i++)
            sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, others + i * apart + at));
        _mm512_mask_storeu_ps(into + at, mask, sum);
    }
}

static void lay_out_bf16(const Block *k, int64_t low, int64_t high, void *masked) {
    gradient_bf16(k, low, high, k->t->out && k->t->for_x ? masked : NULL);
    inputs_bf16(k, low, high);
}
static void lay_out_float(const Block *k, int64_t low, int64_t high, void *masked) {
    gradient_float(k, low, high, k->t->out && k->t->for_x ? masked : NULL);
    inputs_float(k, low, high);
}
static void weight_bf16(const Block *k, int64_t output, int64_t column) { weight_piece(k, output, column, 1); }
static void weight_float(const Block *k, int64_t output, int64_t column) { weight_piece(k, output, column, 0); }

#pragma GCC pop_options

/* Whether this CPU runs them faster than libraries would: those use AMX where there is one. */
int linear_able(int bf16) {
    __builtin_cpu_init();
    int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    if (!bf16) return wide;
    return wide && __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_supports("amx-bf16");
}

/* Bytes of all panels of a weight whose product has `columns` columns and sums over `inner` values. */
static int64_t panel_bytes(int64_t columns, int64_t inner, int bf16) {
    return padded(columns, 16) * 4 * (bf16 ? (inner + 1) / 2 : inner);
}

/* How many pieces of a thread's own share of some work are taken. */
typedef struct {
    int64_t taken;
    char alone[56]; /* in a line of the cache */
} Share;

/* The next one of n pieces for thread `me` of a team, or -1: first those of its own share, whose data its caches have
   from the block before, then the others', so that no thread waits for a slower one. `from`: 0 at first. */
static int64_t take(Share *shares, int64_t n, int me, int team, int *from) {
    for (; *from < team; ++*from) {
        int64_t owner = (me + *from) % team, low = n * owner / team, high = n * (owner + 1) / team;
        int64_t piece = low + __atomic_fetch_add(&shares[owner].taken, 1, __ATOMIC_RELAXED);
        if (piece < high) return piece;
    }
    return -1;
}

/* `piece` is each of the pieces that this thread takes. */
#define EACH_PIECE(shares, n)                        \
    for (int from_ = 0, more_ = 1; more_; more_ = 0) \
        for (int64_t piece; (piece = take(shares, n, me, team, &from_)) >= 0;)

/* Fill out; -1 where there is no memory. */
int linear_forward(const Linear *task) {
    const Linear t = *task;
    int64_t steps = t.bf16 ? (t.in + 1) / 2 : t.in;
    int64_t bytes = panel_bytes(t.width, t.in, t.bf16);
    char *b = borrow(bytes + t.threads * sizeof(Share));
    if (!b) return -1;
    Share *shares = memset(b + bytes, 0, t.threads * sizeof(Share));
    Rows rows = {t.x, b, t.out, t.bias, t.x_stride, t.in, t.width, t.relu};
#pragma omp parallel num_threads(t.threads)
    {
        int me = omp_get_thread_num(), team = omp_get_num_threads();
#pragma omp for schedule(static)
        for (int64_t column = 0; column < t.width; column += COLUMNS)
            (t.bf16 ? panel_bf16 : panel_float)(&t, column, b + column * 4 * steps, 1);
        EACH_PIECE(shares, (t.n + ROWS * GROUP - 1) / (ROWS * GROUP)) {
            int64_t row = piece * ROWS * GROUP;
            (t.bf16 ? rows_bf16 : rows_float)(&rows, row, least(row + ROWS * GROUP, t.n));
        }
    }
    give_back(b, bytes + t.threads * sizeof(Share));
    return 0;
}

/* A backward pass. The batch is divided into spans of whole blocks, whose gradients of the weight are added up in order:
   by their number, which depends on the layer and the batch alone, threads share no more than these sums. */
typedef struct {
    Linear t;
    char *a, *b;    /* of each place where a block is laid out: see Block */
    char *masked;   /* of each thread: see lay_out */
    char *panels;   /* the weight, for the gradient of x */
    float *sums;    /* see Block */
    float *others;  /* the gradient of the weight by all spans but the first, whose is for_weight */
    Share *shares;  /* of the spans, and then two for each block */
    int64_t cells, blocks, spans, wide, each, a_bytes, b_bytes, masked_bytes;
    int apart; /* whether threads have whole spans, and places of their own: none waits long for the others then */
} Back;

static int64_t weight_size(const Back *w) { return w->t.in * w->t.width; }

static Back back_of(const Linear *t) {
    Back w = {.t = *t, .each = t->bf16 ? 2 : 1, .wide = padded(t->width, 16)};
    w.cells = (t->n + w.each - 1) / w.each, w.blocks = (w.cells + DEEP - 1) / DEEP;
    w.spans = least(least(SPANS, 1 + SPAN_BYTES / (4 * weight_size(&w))), w.blocks);
    w.apart = padded(w.spans, t->threads) <= w.spans + w.spans / 8;
    w.a_bytes = w.wide / ROWS * TILE, w.b_bytes = padded(t->in, COLUMNS) / COLUMNS * PANEL;
    w.masked_bytes = padded(t->out && t->for_x ? 4 * UNIT * t->width : 0, 64);
    return w;
}

/* Divide the memory of a pass; returns how many bytes it takes. */
static int64_t divide(Back *w, char *memory) {
    const Linear *t = &w->t;
    int64_t used = 0, places = w->apart ? t->threads : 1, parts = (w->cells + UNIT - 1) / UNIT;
    w->a = room(memory, &used, places * w->a_bytes), w->b = room(memory, &used, places * w->b_bytes);
    w->masked = room(memory, &used, t->threads * w->masked_bytes);
    w->panels = room(memory, &used, t->for_x ? panel_bytes(t->in, t->width, t->bf16) : 0);
    w->sums = room(memory, &used, 4 * parts * w->wide);
    w->others = room(memory, &used, 4 * (w->spans - 1) * weight_size(w));
    int64_t shares = (1 + 2 * w->blocks) * t->threads * sizeof(Share);
    w->shares = room(memory, &used, shares);
    if (memory) memset(w->shares, 0, shares);
    return used;
}

/* Lay out a piece of a block, and give its gradient of x. */
static void back_piece(const Back *w, const Block *k, int64_t low, int64_t high, void *masked) {
    const Linear *t = &w->t;
    int64_t row = (k->cell + low) * w->each, bytes = 4 / w->each;
    (t->bf16 ? lay_out_bf16 : lay_out_float)(k, low, high, masked);
    if (!t->for_x) return;
    const void *grad = t->out ? masked : (const char *)t->grad + row * t->width * bytes;
    Rows rows = {grad, w->panels, (char *)t->for_x + row * t->in * bytes, NULL, t->width, t->width, t->in, 0};
    (t->bf16 ? rows_bf16 : rows_float)(&rows, 0, least((high - low) * w->each, t->n - row));
}

/* A block, by thread `me` of a team that shares it; a team of one is alone. */
static void back_block(const Back *w, const Block *k, Share *shares, int me, int team, void *masked) {
    const Linear *t = &w->t;
    int64_t across = (t->in + COLUMNS - 1) / COLUMNS, down = (t->width + ROWS * GROUP - 1) / (ROWS * GROUP);
    EACH_PIECE(shares, (k->count + UNIT - 1) / UNIT)
        back_piece(w, k, piece * UNIT, least(piece * UNIT + UNIT, k->count), masked);
    if (team > 1) {
#pragma omp barrier
    }
    EACH_PIECE(shares + team, across * down)
        (t->bf16 ? weight_bf16 : weight_float)(k, piece % down * (ROWS * GROUP), piece / down * COLUMNS);
    if (team > 1) {
#pragma omp barrier
    }
}

/* The blocks of a span, laid out at `place`. */
static void back_span(const Back *w, int64_t span, int place, int me, int team) {
    int64_t begin = w->blocks * span / w->spans, end = w->blocks * (span + 1) / w->spans;
    float *into = span ? w->others + (span - 1) * weight_size(w) : w->t.for_weight;
    void *masked = w->masked + omp_get_thread_num() * w->masked_bytes;
    for (int64_t block = begin; block < end; block++) {
        int64_t cell = block * DEEP;
        Block k = {&w->t, w->a + place * w->a_bytes, w->b + place * w->b_bytes, w->sums, into, w->wide, cell,
                   least(w->cells - cell, DEEP), block == begin};
        Share own[2] = {{0}, {0}};
        back_block(w, &k, team > 1 ? w->shares + team + 2 * team * block : own, me, team, masked);
    }
}

/* The spans of the batch, by all threads. */
static void back_spans(const Back *w) {
    const Linear *t = &w->t;
    int64_t steps = (t->width + w->each - 1) / w->each;
#pragma omp parallel num_threads(t->threads)
    {
        int me = omp_get_thread_num(), team = omp_get_num_threads();
        if (t->for_x) {
#pragma omp for schedule(static)
            for (int64_t column = 0; column < t->in; column += COLUMNS)
                (t->bf16 ? panel_bf16 : panel_float)(t, column, w->panels + column * 4 * steps, 0);
        }
        if (w->apart)
            EACH_PIECE(w->shares, w->spans) back_span(w, piece, me, 0, 1);
        else
            for (int64_t span = 0; span < w->spans; span++) back_span(w, span, 0, me, team);
#pragma omp barrier
#pragma omp for schedule(static)
        for (int64_t row = 0; row < t->width; row++)
            add_up(t->for_weight + row * t->in, w->others + row * t->in, t->in, w->spans - 1, weight_size(w));
    }
}

/* Fill for_weight and for_bias, and for_x where it is wanted; -1 without memory. */
int linear_backward(const Linear *task) {
    Back w = back_of(task);
    int64_t bytes = divide(&w, NULL);
    char *memory = borrow(bytes);
    if (!memory) return -1;
    divide(&w, memory);
    back_spans(&w);
    memset(task->for_bias, 0, 4 * (size_t)task->width);
    add_up(task->for_bias, w.sums, task->width, (w.cells + UNIT - 1) / UNIT, w.wide);
    give_back(memory, bytes);
    return 0;
}

#else

int linear_able(int bf16) { return (void)bf16, 0; }
int linear_forward(const Linear *task) { return (void)task, -1; }
int linear_backward(const Linear *task) { return (void)task, -1; }

#endif
