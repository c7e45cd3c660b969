/* The work of shampoo.c on one block. Included once for each instruction set; NAME gives the functions their names,
   BYTES is the size of its registers. */

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define OF(name) JOIN(NAME, name)
#define INLINE static inline __attribute__((always_inline))
#define TALL 4    /* rows that a product takes at a time, */
#define VECTORS 2 /* and registers of each */

typedef float OF(floats) __attribute__((vector_size(BYTES), aligned(4)));
typedef double OF(doubles) __attribute__((vector_size(BYTES), aligned(8)));

/* `name`: into[rows, wide] = a[rows, inner] b[inner, wide]. `wide`, a multiple of the lanes of a Vector, is also what
   lies between the rows of b and into; those of a are `apart` values apart. The sums go in the order of `inner`. */
#define PRODUCT(name, Value, Vector)                                                                                  \
    INLINE void OF(name##_tile)(const Value *a, int64_t apart, const Value *b, Value *into, int64_t inner,            \
                                int64_t wide, const int tall, const int vectors) {                                    \
        const int lanes = BYTES / sizeof(Value);                                                                         \
        Vector sums[TALL][VECTORS] = {{{0}}};                                                                               \
        for (int64_t k = 0; k < inner; k++)                                                                           \
            _Pragma("GCC unroll 2") for (int v = 0; v < vectors; v++) {                                               \
                Vector values = *(const Vector *)(b + k * wide + v * lanes);                                          \
                _Pragma("GCC unroll 4") for (int i = 0; i < tall; i++) sums[i][v] += a[i * apart + k] * values;       \
            }                                                                                                         \
        _Pragma("GCC unroll 4") for (int i = 0; i < tall; i++)                                                        \
            _Pragma("GCC unroll 2") for (int v = 0; v < vectors; v++)                                                 \
                *(Vector *)(into + i * wide + v * lanes) = sums[i][v];                                                \
    }                                                                                                                 \
    static void OF(name)(const Value *a, int64_t apart, const Value *b, Value *into, int64_t rows, int64_t inner,     \
                         int64_t wide) {                                                                              \
        const int lanes = BYTES / sizeof(Value);                                                                         \
        for (int64_t j = 0; j < wide;) {                                                                              \
            const int all = j + VECTORS * lanes <= wide;                                                              \
            int64_t i = 0;                                                                                            \
            for (; i + TALL <= rows; i += TALL)                                                                       \
                if (all)                                                                                              \
                    OF(name##_tile)(a + i * apart, apart, b + j, into + i * wide + j, inner, wide, TALL, VECTORS);    \
                else                                                                                                  \
                    OF(name##_tile)(a + i * apart, apart, b + j, into + i * wide + j, inner, wide, TALL, 1);          \
            for (; i < rows; i++)                                                                                     \
                if (all)                                                                                              \
                    OF(name##_tile)(a + i * apart, apart, b + j, into + i * wide + j, inner, wide, 1, VECTORS);       \
                else                                                                                                  \
                    OF(name##_tile)(a + i * apart, apart, b + j, into + i * wide + j, inner, wide, 1, 1);             \
            j += (all ? VECTORS : 1) * lanes;                                                                         \
        }                                                                                                             \
    }

PRODUCT(product, float, OF(floats))
PRODUCT(product64, double, OF(doubles))

/* factor [n, n] from `product`, whose rows are `wide` values apart. */
INLINE void OF(take_in)(double *factor, const double *product, int64_t n, int64_t wide, const Factors *f) {
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < n; j++) factor[i * n + j] = f->old * factor[i * n + j] + f->fresh * product[i * wide + j];
}

static void OF(accumulate)(const Block *block, const Factors *factors, double *memory) {
    if (!block->left) return;
    const int64_t m = block->rows, n = block->columns, tall = (m + 7) & ~7, wide = (n + 7) & ~7;
    double *g = memory, *turned = g + m * wide, *made = turned + n * tall;
    memset(memory, 0, 8 * (size_t)(m * wide + n * tall));
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++)
            g[i * wide + j] = turned[j * tall + i] = block->gradient[i * block->stride + j];
    OF(product64)(g, wide, turned, made, m, n, tall);
    OF(take_in)(block->left, made, m, tall, factors);
    OF(product64)(turned, tall, g, made, n, m, wide);
    OF(take_in)(block->right, made, n, wide, factors);
}

/* The sum of the squares of x [n]. */
INLINE double OF(squared)(const float *x, int64_t n) {
    float lanes[16] = {0};
    double sum = 0.0;
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        for (int j = 0; j < 16; j++) lanes[j] += x[i + j] * x[i + j];
    for (; i < n; i++) lanes[i & 15] += x[i] * x[i];
    for (int j = 0; j < 16; j++) sum += lanes[j];
    return sum;
}

/* Update mean and squares of a row; `grafted` gets Adagrad's or Adam's step. */
INLINE void OF(graft)(const Block *block, int64_t row, const Step *step, float *restrict grafted) {
    const float *restrict g = block->gradient + row * block->stride;
    float *restrict mean = block->mean + row * block->columns, *restrict squares = block->squares + row * block->columns;
    for (int64_t j = 0; j < block->columns; j++) {
        mean[j] += step->fresh * (g[j] - mean[j]);
        squares[j] = step->kept * squares[j] + step->added * g[j] * g[j];
        grafted[j] = step->correction * mean[j] / (sqrtf(step->unbiased * squares[j]) + step->eps);
    }
}

static void OF(direction)(const Block *block, const Step *step, double *memory) {
    const int64_t m = block->rows, n = block->columns, wide = (n + 15) & ~15;
    float *u = (float *)memory, *root = u + m * wide, *bent = root + n * wide;
    double length = 0.0, norm = 0.0;
    if (!block->left || !step->rooted) {
        for (int64_t i = 0; i < m; i++) OF(graft)(block, i, step, block->direction + i * n);
        return;
    }
    memset(u, 0, 4 * (size_t)(m * wide));
    memset(root, 0, 4 * (size_t)(n * wide));
    for (int64_t i = 0; i < m; i++) {
        OF(graft)(block, i, step, bent);
        length += OF(squared)(bent, n);
        memcpy(u + i * wide, block->mean + i * n, 4 * (size_t)n);
    }
    for (int64_t i = 0; i < n; i++) memcpy(root + i * wide, block->right_root + i * n, 4 * (size_t)n);
    OF(product)(u, wide, root, bent, m, n, wide);
    OF(product)(block->left_root, m, bent, u, m, m, wide);
    for (int64_t i = 0; i < m; i++) norm += OF(squared)(u + i * wide, n);
    const float scale = norm > 0.0 ? (float)sqrt(length / norm) : 0.0f;
    for (int64_t i = 0; i < m; i++)
        for (int64_t j = 0; j < n; j++) block->direction[i * n + j] = scale * u[i * wide + j];
}

static void OF(move)(const Block *block) {
    const float kept = 1.0f - block->decay, rate = block->rate;
    for (int64_t i = 0; i < block->rows; i++) {
        float *restrict w = block->parameter + i * block->stride;
        const float *restrict along = block->direction + i * block->columns;
        for (int64_t j = 0; j < block->columns; j++) w[j] = kept * w[j] - rate * along[j];
    }
}

#undef JOIN_
#undef JOIN
#undef OF
#undef INLINE
#undef TALL
#undef VECTORS
#undef PRODUCT
