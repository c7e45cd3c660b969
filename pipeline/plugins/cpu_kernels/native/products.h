/* Products of linear.c, in float32 or bf16: rows times panels, and weights laid out as panels. Included by it alone, where
   AVX-512 is allowed. */

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    const char *a[ROWS]; /* where each row's cells begin */
    int64_t a_step;      /* bytes from a row's cell to the next */
    const char *b;       /* cells of the panel: [steps][vecs][16] */
    int64_t steps;
    int odd; /* whether the last cell has one bf16 only */
} Operands;

/* A float, or two bf16, at any address: bf16 rows of an odd width begin between floats. */
INLINE float pair_at(const char *place) {
    float pair;
    memcpy(&pair, place, sizeof pair);
    return pair;
}

/* Add to the sums of a tile. */
INLINE void multiply(const Operands *o, __m512 sums[ROWS][VECS], const int vecs, const int bf16) {
    const char *a0 = o->a[0], *a1 = o->a[1], *a2 = o->a[2], *a3 = o->a[3], *a4 = o->a[4], *a5 = o->a[5], *a6 = o->a[6],
               *a7 = o->a[7], *b = o->b;
    int64_t at = 0, step = o->a_step;
#define CELL(r) _mm512_set1_ps(pair_at(a##r + at))
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

INLINE __m512i rounded(__m512 x) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)); }

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
                _mm512_store_si512(into, _mm512_or_si512(rounded(one), _mm512_slli_epi32(rounded(two), 16)));
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
