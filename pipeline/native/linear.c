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

#define LINEAR_VERSION 1 /* pipeline/native/layers.py expects it */
#define ROWS 8
#define VECS 3
#define COLUMNS (16 * VECS) /* of a panel */
#define DEEP 256            /* cells of a block of the sum over a batch, which stays in the caches */
#define TILE (DEEP * ROWS * 4 + 64) /* no power of two: their lines would share a few sets of the cache */
#define PANEL (DEEP * COLUMNS * 4 + 64)
#define UNIT 32             /* cells that a thread lays out at a time */
#define GROUP 8             /* tiles of a piece of work */

typedef struct {
    const void *x;       /* [n, in], rows `x_stride` values apart: float32 or bf16, as are out, grad, masked, for_x */
    const float *weight; /* [width, in] */
    const float *bias;   /* [width]; NULL: none */
    void *out;           /* [n, width]; in the backward pass NULL where there is no ReLU */
    const void *grad;    /* [n, width] */
    void *masked;        /* [n, width]: room for the gradient behind the ReLU */
    void *for_x;         /* [n, in]; NULL: not wanted */
    float *for_weight;   /* [width, in] */
    float *for_bias;     /* [width] */
    int64_t n, in, width, x_stride;
    int32_t relu, bf16, threads;
} Linear;

int linear_version(void) { return LINEAR_VERSION; }

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma,avx2")
#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const char *a[ROWS]; /* where each row's cells begin */
    int64_t a_step;      /* bytes from a row's cell to the next */
    const char *b;       /* cells of the panel: [steps][vecs][16] */
    int64_t steps;
    int odd; /* whether the last cell has one bf16 only */
} Operands;

/* Sums of a tile. `first`: they begin at `from` (NULL: at 0). */
INLINE void multiply(const Operands *o, __m512 sums[ROWS][VECS], const int vecs, const int bf16) {
    const char *a0 = o->a[0], *a1 = o->a[1], *a2 = o->a[2], *a3 = o->a[3], *a4 = o->a[4], *a5 = o->a[5], *a6 = o->a[6],
               *a7 = o->a[7], *b = o->b;
    int64_t at = 0, step = o->a_step;
#define CELL(r) _mm512_set1_ps(*(const float *)(a##r + at))
#define ODD(r) _mm512_castsi512_ps(_mm512_set1_epi32(*(const uint16_t *)(a##r + at)))
#define STEP(r, cell, v)                                                                            \
    if (v < vecs)                                                                                   \
        sums[r][v] = bf16 ? _mm512_dpbf16_ps(sums[r][v], (__m512bh)(cell), (__m512bh)b##v)          \
                          : _mm512_fmadd_ps(cell, b##v, sums[r][v]);
#define ROW(r, OF)                     \
    {                                  \
        __m512 cell = OF(r);           \
        STEP(r, cell, 0)               \
        STEP(r, cell, 1)               \
        STEP(r, cell, 2)               \
    }
#define ALL(OF) ROW(0, OF) ROW(1, OF) ROW(2, OF) ROW(3, OF) ROW(4, OF) ROW(5, OF) ROW(6, OF) ROW(7, OF)
#define LOADED                                                                           \
    __m512 b0 = _mm512_load_ps(b), b1 = vecs > 1 ? _mm512_load_ps(b + 64) : b0,          \
           b2 = vecs > 2 ? _mm512_load_ps(b + 128) : b0;                                 \
    b += 64 * vecs;
    for (int64_t i = o->steps - (o->odd != 0); i > 0; i--, at += step) {
        LOADED
        ALL(CELL)
    }
    if (bf16 && o->odd) {
        LOADED
        ALL(ODD)
    }
}

INLINE int64_t panel_vecs(int64_t columns, int64_t column) {
    int64_t vecs = (columns - column + 15) / 16;
    return vecs < VECS ? vecs : VECS;
}

INLINE __mmask16 lanes(int64_t columns) { return columns >= 16 ? 0xffff : columns <= 0 ? 0 : (1u << columns) - 1; }

/* The lanes of `mask`, by an instruction without a mask where it can be: those with one take several cycles. */
INLINE __m512i load(const void *from, int64_t at, __mmask16 mask, const int bf16) {
    if (bf16) {
        const uint16_t *p = (const uint16_t *)from + at;
        __m256i x = mask == 0xffff ? _mm256_loadu_si256((const __m256i *)p) : _mm256_maskz_loadu_epi16(mask, p);
        return _mm512_cvtepu16_epi32(x);
    }
    return _mm512_castps_si512(_mm512_maskz_loadu_ps(mask, (const float *)from + at));
}

INLINE void store(void *into, int64_t at, __mmask16 mask, __m512 x, const int bf16) {
    if (bf16) {
        uint16_t *p = (uint16_t *)into + at;
        __m256i rounded = (__m256i)_mm512_cvtneps_pbh(x);
        if (mask == 0xffff)
            _mm256_storeu_si256((__m256i *)p, rounded);
        else
            _mm256_mask_storeu_epi16(p, mask, rounded);
    } else if (mask == 0xffff)
        _mm512_storeu_ps((float *)into + at, x);
    else
        _mm512_mask_storeu_ps((float *)into + at, mask, x);
}

/* Store what `load` gave. */
INLINE void keep(void *into, int64_t at, __mmask16 mask, __m512i x, const int bf16) {
    if (bf16 && mask == 0xffff)
        _mm256_storeu_si256((__m256i *)((uint16_t *)into + at), _mm512_cvtepi32_epi16(x));
    else if (bf16)
        _mm256_mask_storeu_epi16((uint16_t *)into + at, mask, _mm512_cvtepi32_epi16(x));
    else
        _mm512_mask_storeu_epi32((float *)into + at, mask, x);
}

INLINE __m512i rounded(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }

/* Cells of two rows of `load`: one float32 of the first, or the bf16 of both. */
INLINE __m512i cells(__m512i one, __m512i two, const int bf16) {
    return bf16 ? _mm512_or_si512(one, _mm512_slli_epi32(two, 16)) : one;
}

/* A product of rows of `a` with all panels of `b` that writes rows of `into`. */
typedef struct {
    const void *a; /* [rows, inner], rows `a_stride` values apart */
    const char *b; /* panels one after the other, each [steps][vecs][16] cells */
    void *into;    /* [rows, columns] */
    const float *bias;
    int64_t a_stride, inner, columns;
    int relu;
} Rows;

INLINE void rows_panel(const Rows *t, int64_t row, int64_t rows, int64_t column, const char *b, const int vecs,
                       const int bf16) {
    Operands o = {.a_step = 4, .b = b, .steps = bf16 ? (t->inner + 1) / 2 : t->inner, .odd = bf16 ? t->inner & 1 : 0};
    int64_t bytes = bf16 ? 2 : 4;
    for (int64_t r = 0; r < ROWS; r++)
        o.a[r] = (const char *)t->a + (row + (r < rows ? r : rows - 1)) * t->a_stride * bytes;
    __m512 sums[ROWS][VECS];
    for (int v = 0; v < vecs; v++) {
        __mmask16 mask = lanes(t->columns - column - 16 * v);
        __m512 begin = t->bias ? _mm512_maskz_loadu_ps(mask, t->bias + column + 16 * v) : _mm512_setzero_ps();
        for (int r = 0; r < ROWS; r++) sums[r][v] = begin;
    }
    multiply(&o, sums, vecs, bf16);
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < vecs; v++) {
            __m512 x = t->relu ? _mm512_max_ps(_mm512_setzero_ps(), sums[r][v]) : sums[r][v]; /* NaN stays NaN */
            __mmask16 mask = r < rows ? lanes(t->columns - column - 16 * v) : 0;
            store(t->into, (row + (r < rows ? r : 0)) * t->columns + column + 16 * v, mask, x, bf16);
        }
}

/* Rows [low, high) of a product, panel by panel, so that each panel is read once. */
INLINE void rows_piece(const Rows *t, int64_t low, int64_t high, const int bf16) {
    int64_t steps = bf16 ? (t->inner + 1) / 2 : t->inner;
    for (int64_t column = 0; column < t->columns; column += COLUMNS) {
        int64_t vecs = panel_vecs(t->columns, column);
        const char *b = t->b + column * 4 * steps;
        for (int64_t row = low; row < high; row += ROWS) {
            int64_t rows = high - row < ROWS ? high - row : ROWS;
            if (vecs == 3)
                rows_panel(t, row, rows, column, b, 3, bf16);
            else if (vecs == 2)
                rows_panel(t, row, rows, column, b, 2, bf16);
            else
                rows_panel(t, row, rows, column, b, 1, bf16);
        }
    }
}

static void rows_bf16(const Rows *t, int64_t low, int64_t high) { rows_piece(t, low, high, 1); }
static void rows_float(const Rows *t, int64_t low, int64_t high) { rows_piece(t, low, high, 0); }

/* Lay out the panel from output `column` of the weight for the forward pass: its sum runs over the inputs. */
INLINE void forward_panel(const Linear *t, int64_t column, char *into, const int bf16) {
    int64_t vecs = panel_vecs(t->width, column), steps = bf16 ? (t->in + 1) / 2 : t->in;
    for (int64_t lane = 0; lane < 16 * vecs; lane++) {
        uint32_t *to = (uint32_t *)into + lane;
        if (column + lane >= t->width) {
            for (int64_t s = 0; s < steps; s++) to[s * 16 * vecs] = 0;
            continue;
        }
        const float *row = t->weight + (column + lane) * t->in;
        for (int64_t s = 0; s < steps; s += 16) {
            uint32_t sixteen[16];
            if (bf16) {
                __m512 low = _mm512_maskz_loadu_ps(lanes(t->in - 2 * s), row + 2 * s);
                __m512 high = _mm512_maskz_loadu_ps(lanes(t->in - 2 * s - 16), row + 2 * s + 16);
                _mm512_storeu_si512(sixteen, (__m512i)_mm512_cvtne2ps_pbh(high, low));
            } else
                _mm512_storeu_ps((float *)sixteen, _mm512_maskz_loadu_ps(lanes(t->in - s), row + s));
            for (int64_t i = 0; i < 16 && s + i < steps; i++) to[(s + i) * 16 * vecs] = sixteen[i];
        }
    }
}

/* The panel from input `column` for the gradient of the inputs: its sum runs over the outputs. */
INLINE void backward_panel(const Linear *t, int64_t column, char *into, const int bf16) {
    int64_t vecs = panel_vecs(t->in, column), steps = bf16 ? (t->width + 1) / 2 : t->width;
    for (int64_t s = 0; s < steps; s++)
        for (int64_t v = 0; v < vecs; v++, into += 64) {
            int64_t at = column + 16 * v, row = bf16 ? 2 * s : s;
            __mmask16 mask = lanes(t->in - at);
            __m512 one = _mm512_maskz_loadu_ps(mask, t->weight + row * t->in + at), two = one;
            if (bf16) two = _mm512_maskz_loadu_ps(row + 1 < t->width ? mask : 0, t->weight + (row + 1) * t->in + at);
            if (bf16)
                _mm512_store_si512(into, cells(rounded(one), rounded(two), 1));
            else
                _mm512_store_ps(into, one);
        }
}

static void panel_bf16(const Linear *t, int64_t column, char *into, int forward) {
    if (forward)
        forward_panel(t, column, into, 1);
    else
        backward_panel(t, column, into, 1);
}
static void panel_float(const Linear *t, int64_t column, char *into, int forward) {
    if (forward)
        forward_panel(t, column, into, 0);
    else
        backward_panel(t, column, into, 0);
}

/* A block of the batch, laid out for the gradient of the weight, whose sum runs over samples. */
typedef struct {
    const Linear *t;
    const void *grad; /* behind the ReLU once it is laid out */
    char *a;          /* tiles of the gradient, TILE bytes apart: [DEEP][ROWS] cells each */
    char *b;          /* panels of x, PANEL bytes apart: [DEEP][vecs][16] cells each */
    float *sums;      /* of the gradient's columns, one row for each UNIT of the batch, rows `wide` apart */
    int64_t wide;
    int64_t cell, count; /* the block's first cell in the batch, and its cells */
} Block;

/* Cells [low, high) of the block: mask the gradient, add up its columns, lay out gradient and x. */
INLINE void lay_out(const Block *k, int64_t low, int64_t high, const int bf16) {
    const Linear *t = k->t;
    int64_t each = bf16 ? 2 : 1;
    float *sums = k->sums + (k->cell + low) / UNIT * k->wide;
    memset(sums, 0, 4 * (size_t)k->wide);
    for (int64_t c = low; c < high; c++) {
        int64_t row = (k->cell + c) * each;
        char *to = k->a + c * ROWS * 4;
        for (int64_t column = 0; column < k->wide; column += 16, to += 2 * TILE) {
            __m512i g[2];
            __m512 sum = _mm512_loadu_ps(sums + column);
            for (int64_t i = 0; i < each; i++) {
                int64_t at = (row + i) * t->width + column;
                __mmask16 here = row + i < t->n ? lanes(t->width - column) : 0;
                g[i] = load(t->grad, at, here, bf16);
                if (t->out) { /* of a ReLU: 0 or above, or NaN, which keeps the gradient */
                    __m512i out = _mm512_slli_epi32(load(t->out, at, here, bf16), 1);
                    g[i] = _mm512_maskz_mov_epi32(_mm512_test_epi32_mask(out, out), g[i]);
                    keep(t->masked, at, here, g[i], bf16);
                }
                sum = _mm512_add_ps(sum, _mm512_castsi512_ps(bf16 ? _mm512_slli_epi32(g[i], 16) : g[i]));
            }
            __m512i cell = cells(g[0], g[bf16 ? 1 : 0], bf16);
            _mm512_storeu_ps(sums + column, sum);
            _mm256_store_si256((__m256i *)to, _mm512_castsi512_si256(cell));
            _mm256_store_si256((__m256i *)(to + TILE), _mm512_extracti32x8_epi32(cell, 1));
        }
        for (int64_t column = 0; column < t->in; column += COLUMNS) {
            int64_t vecs = panel_vecs(t->in, column);
            to = k->b + column / COLUMNS * PANEL + c * vecs * 64;
            for (int64_t v = 0; v < vecs; v++, to += 64) {
                int64_t at = column + 16 * v;
                __mmask16 mask = lanes(t->in - at);
                __m512i one = load(t->x, row * t->x_stride + at, mask, bf16), two = one;
                if (bf16) two = load(t->x, (row + 1) * t->x_stride + at, row + 1 < t->n ? mask : 0, bf16);
                _mm512_store_si512(to, cells(one, two, bf16));
            }
        }
    }
}

INLINE void weight_panel(const Block *k, int64_t output, int64_t column, const int vecs, const int bf16) {
    const Linear *t = k->t;
    Operands o = {.a_step = ROWS * 4, .b = k->b + column / COLUMNS * PANEL, .steps = k->count};
    for (int64_t r = 0; r < ROWS; r++) o.a[r] = k->a + output / ROWS * TILE + 4 * r;
    int64_t rows = t->width - output < ROWS ? t->width - output : ROWS;
    __m512 sums[ROWS][VECS];
    float *into = t->for_weight + output * t->in + column;
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
            __m512 before = k->cell ? _mm512_maskz_loadu_ps(mask, to) : _mm512_setzero_ps();
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

static void lay_out_bf16(const Block *k, int64_t low, int64_t high) { lay_out(k, low, high, 1); }
static void lay_out_float(const Block *k, int64_t low, int64_t high) { lay_out(k, low, high, 0); }
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

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t padded(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static char *room(int64_t bytes) { return aligned_alloc(64, padded(bytes > 0 ? bytes : 1, 64)); }

/* Bytes of all panels of a weight whose product has `columns` columns and sums over `inner` values. */
static int64_t panel_bytes(int64_t columns, int64_t inner, int bf16) {
    return padded(columns, 16) * 4 * (bf16 ? (inner + 1) / 2 : inner);
}

/* Fill out; -1 where there is no memory. */
int linear_forward(const Linear *task) {
    const Linear t = *task;
    int64_t steps = t.bf16 ? (t.in + 1) / 2 : t.in;
    char *b = room(panel_bytes(t.width, t.in, t.bf16));
    if (!b) return -1;
    Rows rows = {t.x, b, t.out, t.bias, t.x_stride, t.in, t.width, t.relu};
#pragma omp parallel num_threads(t.threads)
    {
#pragma omp for schedule(static)
        for (int64_t column = 0; column < t.width; column += COLUMNS)
            (t.bf16 ? panel_bf16 : panel_float)(&t, column, b + column * 4 * steps, 1);
#pragma omp for schedule(dynamic, 1) nowait
        for (int64_t row = 0; row < t.n; row += ROWS * GROUP)
            (t.bf16 ? rows_bf16 : rows_float)(&rows, row, least(row + ROWS * GROUP, t.n));
    }
    free(b);
    return 0;
}

/* Fill for_weight and for_bias, for_x where it is wanted, and masked where there is a ReLU; -1 without memory. */
int linear_backward(const Linear *task) {
    const Linear t = *task;
    int64_t each = t.bf16 ? 2 : 1, cells = (t.n + each - 1) / each, steps = (t.width + each - 1) / each;
    int64_t wide = padded(t.width, 16), parts = (cells + UNIT - 1) / UNIT;
    char *a = room(wide / ROWS * TILE), *b = room((t.in + COLUMNS - 1) / COLUMNS * PANEL);
    char *panels = room(t.for_x ? panel_bytes(t.in, t.width, t.bf16) : 0);
    float *sums = (float *)room(parts * wide * 4);
    int failed = !a || !b || !panels || !sums;
    const void *grad = t.out ? t.masked : t.grad;
    Rows rows = {grad, panels, t.for_x, NULL, t.width, t.width, t.in, 0};
#pragma omp parallel num_threads(t.threads) if (!failed)
    if (!failed) {
        if (t.for_x) {
#pragma omp for schedule(static) nowait
            for (int64_t column = 0; column < t.in; column += COLUMNS)
                (t.bf16 ? panel_bf16 : panel_float)(&t, column, panels + column * 4 * steps, 0);
        }
        for (int64_t cell = 0; cell < cells; cell += DEEP) {
            Block k = {&t, grad, a, b, sums, wide, cell, least(cells - cell, DEEP)};
            int64_t across = (t.in + COLUMNS - 1) / COLUMNS, down = (t.width + ROWS * GROUP - 1) / (ROWS * GROUP);
#pragma omp for schedule(dynamic, 1)
            for (int64_t low = 0; low < k.count; low += UNIT)
                (t.bf16 ? lay_out_bf16 : lay_out_float)(&k, low, least(low + UNIT, k.count));
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t piece = 0; piece < across * down; piece++)
                (t.bf16 ? weight_bf16 : weight_float)(&k, piece % down * (ROWS * GROUP), piece / down * COLUMNS);
            int64_t end = t.for_x ? least((cell + k.count) * each, t.n) : 0;
#pragma omp for schedule(dynamic, 1)
            for (int64_t row = cell * each; row < end; row += ROWS * GROUP)
                (t.bf16 ? rows_bf16 : rows_float)(&rows, row, least(row + ROWS * GROUP, end));
        }
    }
    if (!failed) {
        memset(t.for_bias, 0, 4 * (size_t)t.width);
        for (int64_t part = 0; part < parts; part++)
            for (int64_t column = 0; column < t.width; column++) t.for_bias[column] += sums[part * wide + column];
    }
    free(a), free(b), free(panels), free(sums);
    return failed ? -1 : 0;
}

#else

int linear_able(int bf16) { return (void)bf16, 0; }
int linear_forward(const Linear *task) { return (void)task, -1; }
int linear_backward(const Linear *task) { return (void)task, -1; }

#endif
