/* Bricks of crosses.c: pieces of matrices of 32 by 32 bf16, laid out so that a product reads nothing but whole lines,
   one after the other. Included by it alone, where AVX-512 is allowed.

   A product's left matrix consists of bricks whose 32 rows follow each other. Those of its right matrix are two tiles,
   the even columns and the odd ones; a line of a tile holds the values of two neighbouring rows, column by column,
   since an instruction adds two products of bf16 at a time. Both instruction sets read the same bricks. The bricks that
   a sum runs over are neighbours. A product of bricks is a block of 32 by 32 float32: four tiles of 16 by 16, one after
   the other. With even and odd columns apart, bf16 become float32 by a shift or a mask, and float32 become rows of left
   bricks or lines of right ones by the same instructions. */

#define INLINE static inline __attribute__((always_inline))
#define SIDE 32    /* rows and columns of a brick */
#define BRICK 2048 /* bytes */
#define TILE 1024  /* bytes of a tile: half a brick, or a quarter of a block */
#define BLOCK 1024 /* values */

/* The rows or columns of a matrix: `groups` pieces of `width` values, of which each begins a brick. */
typedef struct {
    int64_t groups, width;
} Axis;

typedef struct {
    const float *values;
    Axis rows, columns;
} Matrix;

/* A sum of products of bricks: left[0] * right[0] + left[1] * right[1] + ... Of the last one of each group of `each`,
   only the first `last` bytes of the right one's tiles have values, if an instruction set can tell. */
typedef struct {
    const char *left, *right;
    int64_t bricks, each, last;
} Sum;

/* A block of a product: `begin` plus the sums of both terms. */
typedef struct {
    Sum terms[2];
    const float *begin; /* [32]: each row begins with it; NULL: with 0, or with what the block has (`add`) */
    float *into;
    int add;
    int64_t rows; /* that are needed; the others may have anything */
} Product;

static inline int64_t bricks_of(int64_t values) { return (values + SIDE - 1) / SIDE; }
static inline int64_t bricks_along(Axis a) { return a.groups * bricks_of(a.width); }

INLINE __mmask32 lanes32(int64_t count) { return count >= 32 ? ~0u : count <= 0 ? 0 : (1u << count) - 1; }
INLINE __mmask16 lanes16(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

/* The first value of a brick along an axis; `count`: how many the axis has from there that belong to the brick. */
static inline int64_t first_of(Axis a, int64_t brick, int64_t *count) {
    int64_t each = bricks_of(a.width), inside = brick % each * SIDE;
    *count = least(SIDE, a.width - inside);
    return brick / each * a.width + inside;
}

/* A sum over an axis, whose bricks are neighbours in both matrices. */
INLINE Sum sum_over(Axis a, const char *left, const char *right) {
    int64_t each = bricks_of(a.width), inside = a.width - (each - 1) * SIDE;
    return (Sum){left, right, a.groups * each, each, (inside + 1) / 2 * 64};
}

/* Where a value that belongs to a column is, among those of whole bricks: first those of even columns. */
static inline int64_t slot(int64_t column) { return column / SIDE * SIDE + column % 2 * 16 + column % SIDE / 2; }

/* The even (0) or odd (1) columns of a row of a block. */
INLINE float *half(float *block, int64_t row, int64_t odd) {
    return block + (row / 16 * 2 + odd) * 256 + row % 16 * 16;
}

/* The even or odd columns of a row of a left brick. */
INLINE __m512 half_of(__m512i row, int odd) {
    return (__m512)(odd ? _mm512_and_si512(row, _mm512_set1_epi32(0xffff0000)) : _mm512_slli_epi32(row, 16));
}

/* The values of both by turns, rounded: a row from its even and odd columns, or a line of a tile from two rows. */
INLINE __m512i rounded(__m512 one, __m512 two) {
    const __m512i turns = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(turns, (__m512i)_mm512_cvtne2ps_pbh(two, one));
}

INLINE __m512i row_at(const char *brick, int64_t row) { return _mm512_load_si512(brick + 64 * row); }
INLINE void set_row(char *brick, int64_t row, __m512i values) { _mm512_store_si512(brick + 64 * row, values); }

/* The values of two rows, column by column: a line of either tile. */
INLINE void set_pair(char *brick, int64_t pair, __m512i one, __m512i two) {
    const __mmask32 odd = 0xaaaaaaaa;
    _mm512_store_si512(brick + 64 * pair, _mm512_mask_blend_epi16(odd, one, _mm512_slli_epi32(two, 16)));
    _mm512_store_si512(brick + 64 * pair + TILE, _mm512_mask_blend_epi16(odd, _mm512_srli_epi32(one, 16), two));
}

/* Read bf16 into a left brick, with zeros where there is nothing. */
INLINE void read_bf16(const uint16_t *from, int64_t stride, int64_t rows, int64_t columns, char *brick) {
    __mmask32 here = lanes32(columns);
    for (int64_t r = 0; r < SIDE; r++)
        set_row(brick, r, r < rows ? _mm512_maskz_loadu_epi16(here, from + r * stride) : _mm512_setzero_si512());
}

INLINE void write_bf16(const char *brick, uint16_t *to, int64_t stride, int64_t rows, int64_t columns) {
    __mmask32 here = lanes32(columns);
    for (int64_t r = 0; r < rows; r++) _mm512_mask_storeu_epi16(to + r * stride, here, row_at(brick, r));
}

/* Brick (i, j) of a matrix, rounded to bf16. */
static void read_float(const Matrix *m, int64_t i, int64_t j, char *brick) {
    int64_t rows, columns, row = first_of(m->rows, i, &rows), column = first_of(m->columns, j, &columns);
    int64_t stride = m->columns.groups * m->columns.width;
    const float *from = m->values + row * stride + column;
    for (int64_t r = 0; r < SIDE; r++, from += stride) {
        __mmask16 low = lanes16(r < rows ? columns : 0), high = lanes16(r < rows ? columns - 16 : 0);
        __m512 first = _mm512_maskz_loadu_ps(low, from), second = _mm512_maskz_loadu_ps(high, from + 16);
        set_row(brick, r, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
}

/* The right brick with the same rows as a left one. */
INLINE void pair_rows(const char *brick, char *into) {
    for (int64_t r = 0; r < SIDE; r += 2) set_pair(into, r / 2, row_at(brick, r), row_at(brick, r + 1));
}

/* Exchange rows and columns of 16 lines of 16 values of four bytes; lines are so many bytes apart. */
INLINE void turn_lines(const char *from, int64_t from_apart, char *into, int64_t into_apart) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_load_si512(from + from_apart * i);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int k = 0; k < 2; k++) {
            a[i + 2 * k] = _mm512_unpacklo_epi64(b[i + k], b[i + k + 2]);
            a[i + 2 * k + 1] = _mm512_unpackhi_epi64(b[i + k], b[i + k + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int k = 0; k < 4; k++) {
            b[i + k] = _mm512_shuffle_i32x4(a[i + k], a[i + k + 4], 0x88);
            b[i + k + 4] = _mm512_shuffle_i32x4(a[i + k], a[i + k + 4], 0xdd);
        }
    for (int k = 0; k < 8; k++) {
        _mm512_store_si512(into + into_apart * k, _mm512_shuffle_i32x4(b[k], b[k + 8], 0x88));
        _mm512_store_si512(into + into_apart * (k + 8), _mm512_shuffle_i32x4(b[k], b[k + 8], 0xdd));
    }
}

/* The right brick that has a left brick's rows as its columns. */
static void turn(const char *brick, char *into) {
    turn_lines(brick, 128, into, 64);
    turn_lines(brick + 64, 128, into + TILE, 64);
}

/* The left brick that has a left brick's columns as its rows. */
static void turn_left(const char *brick, char *into) {
    char pairs[BRICK] __attribute__((aligned(64)));
    pair_rows(brick, pairs);
    turn_lines(pairs, 64, into, 128);
    turn_lines(pairs + TILE, 64, into + 64, 128);
}

/* A block, rounded, as a left brick. */
INLINE void round_block(float *block, char *brick) {
    for (int64_t r = 0; r < SIDE; r++)
        set_row(brick, r, rounded(_mm512_load_ps(half(block, r, 0)), _mm512_load_ps(half(block, r, 1))));
}

/* Brick `at` of the right matrix of a product that sums over the rows of m, or, `turned`, over its columns. */
static void pack(const Matrix *m, int turned, int64_t at, char *into) {
    char brick[BRICK] __attribute__((aligned(64)));
    int64_t inner = bricks_along(turned ? m->columns : m->rows), outer = at / inner, inside = at % inner;
    if (turned)
        read_float(m, outer, inside, brick), turn(brick, into + at * BRICK);
    else
        read_float(m, inside, outer, brick), pair_rows(brick, into + at * BRICK);
}

/* ROWS rows of a block, by dot products of pairs. */
#define ROWS 8
INLINE void dots_rows(const Product *p, int64_t row) {
    __m512 sums[ROWS][2];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < 2; v++)
            sums[r][v] = p->begin ? _mm512_loadu_ps(p->begin + 16 * v)
                         : p->add ? _mm512_load_ps(half(p->into, row + r, v))
                                  : _mm512_setzero_ps();
    for (int term = 0; term < 2; term++) {
        const char *left = p->terms[term].left + 64 * row, *right = p->terms[term].right;
        int64_t each = p->terms[term].each;
        for (int64_t brick = 1; brick <= p->terms[term].bricks; brick++, left += BRICK, right += BRICK) {
            int64_t end = brick % each ? TILE : p->terms[term].last;
            for (int64_t at = 0; at < end; at += 64) {
                __m512bh one = (__m512bh)_mm512_load_si512(right + at);
                __m512bh two = (__m512bh)_mm512_load_si512(right + TILE + at);
#pragma GCC unroll 8
                for (int r = 0; r < ROWS; r++) {
                    int32_t values;
                    memcpy(&values, left + 64 * r + at / 16, 4);
                    __m512bh pair = (__m512bh)_mm512_set1_epi32(values);
                    sums[r][0] = _mm512_dpbf16_ps(sums[r][0], pair, one);
                    sums[r][1] = _mm512_dpbf16_ps(sums[r][1], pair, two);
                }
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < 2; v++) _mm512_store_ps(half(p->into, row + r, v), sums[r][v]);
}

static void dots_product(const Product *p) {
    for (int64_t row = 0; row < p->rows; row += ROWS) dots_rows(p, row);
}
