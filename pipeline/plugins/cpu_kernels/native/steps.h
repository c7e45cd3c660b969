/* The work of steps.c on some samples or tables. Included once for each instruction set; NAME gives the functions their
   names. Vectors have 16 lanes whatever the registers: the compiler splits them. */

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define OF(name) JOIN(NAME, name)
#define INLINE static inline __attribute__((always_inline))

typedef float OF(floats) __attribute__((vector_size(64), aligned(4)));
typedef int32_t OF(ints) __attribute__((vector_size(64), aligned(4)));
typedef uint32_t OF(words) __attribute__((vector_size(64), aligned(4)));
typedef uint16_t OF(halves) __attribute__((vector_size(32), aligned(2)));
#define Floats OF(floats)
#define Ints OF(ints)
#define Words OF(words)
#define Halves OF(halves)
#define SPLAT(x) ((x) - (Floats){0})
#define AHEAD 16 /* ids to look ahead, so that their rows are in the cache when it is their turn */
#define PREFETCH(values, at) __builtin_prefetch((const char *)(values) + 4 * (uint64_t)(at))
#define AT(pointer) (*(Floats *)(pointer))

/* To nearest even; NaN stays NaN. */
INLINE Halves OF(to_bf16)(Floats x) {
    Words bits = (Words)x, nan = (Words)(x != x);
    Words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    return __builtin_convertvector((rounded & ~nan) | (nan & 0x7fc0u), Halves);
}

INLINE Floats OF(from_bf16)(Halves x) { return (Floats)(__builtin_convertvector(x, Words) << 16); }

INLINE void OF(copy)(float *into, const float *from, int64_t n) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) AT(into + i) = AT(from + i);
    if (i < n) memcpy(into + i, from + i, 4 * (n - i));
}

/* The n values from `at` of an array that ends at `end`, and zeros. */
INLINE Floats OF(up_to_16)(const float *from, int64_t at, int64_t n, int64_t end) {
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Floats part = {0};
    if (n == 16) return AT(from + at);
    if (at + 16 <= end) return (Floats)((Ints)AT(from + at) & (lanes < (int32_t)n));
    memcpy(&part, from + at, 4 * n);
    return part;
}

INLINE Floats OF(up_to_16_halves)(const uint16_t *from, int64_t at, int64_t n, int64_t end) {
    const Ints lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    Halves part = {0};
    if (n == 16) return OF(from_bf16)(*(const Halves *)(from + at));
    if (at + 16 <= end) return (Floats)((Ints)OF(from_bf16)(*(const Halves *)(from + at)) & (lanes < (int32_t)n));
    memcpy(&part, from + at, 2 * n);
    return OF(from_bf16)(part);
}

/* Of a 16 x 16 block of `from`, rows `from_wide` values apart: its transpose. */
#define KEPT(l, s) ((l) & (s) ? 16 + (l) - (s) : (l))
#define MOVED(l, s) ((l) & (s) ? 16 + (l) : (l) + (s))
#define LANES(of, s)                                                                                             \
    ((Ints){of(0, s), of(1, s), of(2, s), of(3, s), of(4, s), of(5, s), of(6, s), of(7, s), of(8, s), of(9, s),  \
            of(10, s), of(11, s), of(12, s), of(13, s), of(14, s), of(15, s)})
#define EXCHANGE(s)                                                                 \
    for (int i = 0; i < 16; i++)                                                    \
        if (!(i & (s))) {                                                           \
            Floats one = a[i], two = a[i + (s)];                                    \
            a[i] = __builtin_shuffle(one, two, LANES(KEPT, s));                     \
            a[i + (s)] = __builtin_shuffle(one, two, LANES(MOVED, s));              \
        }
INLINE void OF(transpose)(const float *from, int64_t from_wide, float *into, int64_t into_wide) {
    Floats a[16];
    for (int i = 0; i < 16; i++) a[i] = AT(from + i * from_wide);
    EXCHANGE(1)
    EXCHANGE(2)
    EXCHANGE(4)
    EXCHANGE(8)
    for (int i = 0; i < 16; i++) AT(into + i * into_wide) = a[i];
}

/* n values of `type` from `at` as floats; what lies behind them up to a multiple of 16 is undefined. */
INLINE void OF(load)(float *into, const void *from, int64_t at, int64_t n, int bf16) {
    int64_t i = 0;
    if (!bf16) {
        memcpy(into, (const float *)from + at, 4 * n);
        return;
    }
    const uint16_t *source = (const uint16_t *)from + at;
    for (; i + 16 <= n; i += 16) AT(into + i) = OF(from_bf16)(*(const Halves *)(source + i));
    for (; i < n; i++) {
        uint32_t bits = (uint32_t)source[i] << 16;
        memcpy(into + i, &bits, 4);
    }
}

INLINE void OF(store)(void *into, int64_t at, const float *from, int64_t n, int bf16) {
    int64_t i = 0;
    if (!bf16) {
        memcpy((float *)into + at, from, 4 * n);
        return;
    }
    uint16_t *target = (uint16_t *)into + at;
    for (; i + 16 <= n; i += 16) *(Halves *)(target + i) = OF(to_bf16)(AT(from + i));
    if (i < n) {
        Floats last = {0};
        memcpy(&last, from + i, 4 * (n - i));
        Halves rounded = OF(to_bf16)(last);
        memcpy(target + i, &rounded, 2 * (n - i));
    }
}

INLINE void OF(store_up_to_16)(void *into, int64_t at, Floats values, int64_t n, int bf16) {
    if (!bf16 && n == 16) {
        AT((float *)into + at) = values;
    } else if (!bf16) {
        memcpy((float *)into + at, &values, 4 * n);
    } else {
        Halves rounded = OF(to_bf16)(values);
        if (n == 16)
            *(Halves *)((uint16_t *)into + at) = rounded;
        else
            memcpy((uint16_t *)into + at, &rounded, 2 * n);
    }
}

/* The vectors of a sample, [V, wide] with zeros behind each: the first in the type of the layer, the others float32,
   which are rounded to it. */
INLINE void OF(vectors)(const Interact *t, int64_t sample, float *x, int64_t wide) {
    int64_t dim = t->dim, other = t->first ? 1 : 0;
    if (other) OF(load)(x, t->first, sample * t->first_stride, dim, t->bf16);
    for (int64_t v = other; v < t->vectors; v++) {
        const float *from = t->rest + sample * t->rest_stride + (v - other) * dim;
        float *into = x + v * wide;
        int64_t i = 0;
        for (; i + 16 <= dim; i += 16)
            AT(into + i) = t->bf16 ? OF(from_bf16)(OF(to_bf16)(AT(from + i))) : AT(from + i);
        if (i < dim) {
            Floats last = {0};
            memcpy(&last, from + i, 4 * (dim - i));
            if (t->bf16) last = OF(from_bf16)(OF(to_bf16)(last));
            memcpy(into + i, &last, 4 * (dim - i));
        }
    }
}

/* Samples [low, high): out = the first vector, then the products of all pairs (1,0), (2,0), (2,1) ... */
static void OF(interact)(const Interact *t, int64_t low, int64_t high, float *memory) {
    int64_t count = t->vectors, dim = t->dim, deep = (dim + 15) & ~15, wide = (count + 15) & ~15;
    float *x = memory, *columns = x + wide * deep, *squares = columns + deep * wide, *y = squares + wide * wide;
    memset(memory, 0, 4 * (size_t)(y - memory));
    for (int64_t sample = low; sample < high; sample++) {
        OF(vectors)(t, sample, x, deep);
        for (int64_t v = 0; v < wide; v += 16)
            for (int64_t k = 0; k < deep; k += 16) OF(transpose)(x + v * deep + k, deep, columns + k * wide + v, wide);
        for (int64_t i = 0; i < count; i += 4) {
            const float *r = x + i * deep;
            for (int64_t c = 0; c < i + 3 && c < count; c += 16) {
                Floats s0 = {0}, s1 = s0, s2 = s0, s3 = s0;
                for (int64_t k = 0; k < dim; k++) {
                    Floats b = AT(columns + k * wide + c);
                    s0 += r[k] * b;
                    s1 += r[deep + k] * b;
                    s2 += r[2 * deep + k] * b;
                    s3 += r[3 * deep + k] * b;
                }
                float *o = squares + i * wide + c;
                AT(o) = s0, AT(o + wide) = s1, AT(o + 2 * wide) = s2, AT(o + 3 * wide) = s3;
            }
        }
        OF(copy)(y, x, dim);
        float *into = y + dim;
        for (int64_t i = 1; i < count; into += i++) /* the end of a row is overwritten by the next one */
            for (int64_t c = 0; c < i; c += 16) AT(into + c) = AT(squares + i * wide + c);
        OF(store)(t->out, sample * t->out_stride, y, into - y, t->bf16);
    }
}

#define ROW(i) (from + (i) * ((i) - 1) / 2) /* the pairs (i, 0), (i, 1) ... (i, i - 1) */

/* Samples [low, high): the gradients of the vectors, from that of the output. Of vector i it is the sum of the other
   vectors, each times the gradient of its pair with i. */
static void OF(interact_back)(const Interact *t, int64_t low, int64_t high, float *memory) {
    int64_t count = t->vectors, dim = t->dim, deep = (dim + 15) & ~15, wide = (count + 15) & ~15;
    int64_t columns = dim + count * (count - 1) / 2, other = t->first ? 1 : 0;
    float *x = memory, *result = x + wide * deep, *g = result + wide * deep;
    const float *from = g + dim;
    memset(memory, 0, 4 * (size_t)(g - memory));
    for (int64_t sample = low; sample < high; sample++) {
        OF(vectors)(t, sample, x, deep);
        OF(load)(g, t->grad, sample * t->out_stride, columns, t->bf16);
        for (int64_t i = 0; i < count; i += 4) {
            float block[4][4] = {{0}};
            for (int64_t r = 0; r < 4 && i + r < count; r++)
                for (int64_t k = 0; k < r; k++) block[r][k] = block[k][r] = ROW(i + r)[i + k];
            for (int64_t c = 0; c < deep; c += 16) {
                Floats s0 = {0}, s1 = s0, s2 = s0, s3 = s0;
                const float *at = x + c;
                for (int64_t k = 0; k < i; k++, at += deep) { /* rows from `count` on are not used */
                    Floats b = AT(at);
                    s0 += ROW(i)[k] * b, s1 += ROW(i + 1)[k] * b, s2 += ROW(i + 2)[k] * b, s3 += ROW(i + 3)[k] * b;
                }
                for (int64_t k = 0; k < 4; k++, at += deep) {
                    Floats b = AT(at);
                    s0 += block[0][k] * b, s1 += block[1][k] * b, s2 += block[2][k] * b, s3 += block[3][k] * b;
                }
                for (int64_t k = i + 4; k < count; k++, at += deep) {
                    const float *pair = ROW(k) + i;
                    Floats b = AT(at);
                    s0 += pair[0] * b, s1 += pair[1] * b, s2 += pair[2] * b, s3 += pair[3] * b;
                }
                float *o = result + i * deep + c;
                AT(o) = s0, AT(o + deep) = s1, AT(o + 2 * deep) = s2, AT(o + 3 * deep) = s3;
            }
        }
        for (int64_t k = 0; k < dim; k++) result[k] += g[k];
        if (other) OF(store)(t->grad_first, sample * dim, result, dim, t->bf16);
        for (int64_t v = other; v < count; v++)
            OF(copy)(t->grad_rest + (sample * (count - other) + v - other) * dim, result + v * deep, dim);
    }
}

/* Rows [low, high) of a layer's backward pass: masked = grad where out > 0, and the sums of its columns. */
static void OF(mask)(const Mask *t, int64_t low, int64_t high, float *sums) {
    int64_t width = t->width;
    for (int64_t row = low; row < high; row++) {
        int64_t at = row * width, i = 0;
        for (; i + 16 <= width; i += 16) {
            Floats g, o;
            if (t->bf16) {
                g = OF(from_bf16)(*(const Halves *)((const uint16_t *)t->grad + at + i));
                if (t->out) {
                    o = OF(from_bf16)(*(const Halves *)((const uint16_t *)t->out + at + i));
                    g = (Floats)((Ints)g & ~(Ints)(o <= 0.0f));
                    *(Halves *)((uint16_t *)t->masked + at + i) = __builtin_convertvector((Words)g >> 16, Halves);
                }
            } else {
                g = AT((const float *)t->grad + at + i);
                if (t->out) {
                    o = AT((const float *)t->out + at + i);
                    g = (Floats)((Ints)g & ~(Ints)(o <= 0.0f));
                    AT((float *)t->masked + at + i) = g;
                }
            }
            AT(sums + i) += g;
        }
        for (; i < width; i++) {
            float g, o = 1.0f;
            OF(load)(&g, t->grad, at + i, 1, t->bf16);
            if (t->out) OF(load)(&o, t->out, at + i, 1, t->bf16);
            if (o <= 0.0f) g = 0.0f;
            if (t->out) OF(store)(t->masked, at + i, &g, 1, t->bf16);
            sums[i] += g;
        }
    }
}

/* Rows [low, high): the logit of each. */
static void OF(head)(const Head *t, int64_t low, int64_t high) {
    int64_t width = t->width;
    for (int64_t row = low; row < high; row++) {
        Floats sum = {0};
        int64_t i = 0, at = row * width;
        for (; i + 16 <= width; i += 16)
            sum += AT(t->weight + i) * (t->bf16 ? OF(from_bf16)(*(const Halves *)((const uint16_t *)t->hidden + at + i))
                                                : AT((const float *)t->hidden + at + i));
        float logit = t->bias, value;
        for (int lane = 0; lane < 16; lane++) logit += sum[lane];
        for (; i < width; i++) {
            OF(load)(&value, t->hidden, at + i, 1, t->bf16);
            logit += t->weight[i] * value;
        }
        t->logits[row] = logit;
    }
}

/* Rows [low, high): the gradient of the hidden values, and the sums that are the gradients of weight and bias. */
static void OF(head_back)(const Head *t, int64_t low, int64_t high, float *sums) {
    int64_t width = t->width;
    for (int64_t row = low; row < high; row++) {
        float g = t->grad[row], value;
        int64_t i = 0, at = row * width;
        for (; i + 16 <= width; i += 16) {
            Floats back = g * AT(t->weight + i);
            if (t->bf16) {
                AT(sums + i) += g * OF(from_bf16)(*(const Halves *)((const uint16_t *)t->hidden + at + i));
                *(Halves *)((uint16_t *)t->grad_hidden + at + i) = OF(to_bf16)(back);
            } else {
                AT(sums + i) += g * AT((const float *)t->hidden + at + i);
                AT((float *)t->grad_hidden + at + i) = back;
            }
        }
        for (; i < width; i++) {
            OF(load)(&value, t->hidden, at + i, 1, t->bf16);
            sums[i] += g * value;
            value = g * t->weight[i];
            OF(store)(t->grad_hidden, at + i, &value, 1, t->bf16);
        }
        sums[width] += g;
    }
}

/* Samples [low, high): the pooled rows of all features. Returns whether every row number is inside its table. */
static int OF(look_up)(const Tables *t, int64_t low, int64_t high) {
    int right = 1;
    for (int64_t f = 0; f < t->features; f++) {
        const float *weights = t->weights[t->table_of[f]];
        int64_t rows = t->rows[t->table_of[f]], dim = t->dims[t->table_of[f]];
        const int64_t *offsets = t->offsets + f * t->batch, *ids = t->ids;
        for (int64_t sample = low; sample < high; sample++) {
            int64_t into = sample * t->width + t->column[f];
            int64_t first = offsets[sample], last = offsets[sample + 1];
            float share = t->mean && last - first > 1 ? 1.0f / (float)(last - first) : 1.0f;
            for (int64_t at = first; at < last; at++) {
                if ((uint64_t)ids[at] >= (uint64_t)rows) right = 0, last = first;
                if (at + AHEAD < t->ids_count) PREFETCH(weights, (uint64_t)ids[at + AHEAD] * (uint64_t)dim);
            }
            for (int64_t d = 0; d < dim; d += 16) {
                int64_t n = dim - d < 16 ? dim - d : 16;
                Floats total = {0};
                for (int64_t at = first; at < last; at++)
                    total += OF(up_to_16)(weights, ids[at] * dim + d, n, rows * dim);
                total *= share;
                OF(store_up_to_16)(t->pooled, into + d, total, n, t->bf16);
            }
        }
    }
    return right;
}

/* One row: its gradient is the sum of those of `count` lookups, in their order; then a step of row-wise Adagrad. */
INLINE void OF(adagrad_row)(const Tables *t, const Entry *entries, int64_t count, const Entry *end, const Lookup *lookups,
                            float *weights, float *sum, int64_t dim, float *g) {
    Floats squares = {0};
    int64_t d = 0;
    for (; d < dim; d += 16) {
        int64_t n = dim - d < 16 ? dim - d : 16;
        Floats total = {0};
        for (int64_t e = 0; e < count; e++) {
            const Lookup *l = lookups + entries[e].lookup;
            if (entries + e + AHEAD < end) {
                int64_t next = lookups[entries[e + AHEAD].lookup].at + d;
                PREFETCH(t->pooled, t->bf16 ? next / 2 : next);
            }
            Floats part = t->bf16 ? OF(up_to_16_halves)(t->pooled, l->at + d, n, t->batch * t->width)
                                  : OF(up_to_16)(t->pooled, l->at + d, n, t->batch * t->width);
            total += t->mean ? part * l->share : part;
        }
        AT(g + d) = total;
        squares += total * total;
    }
    float q[8]; /* added up in the order of FBGEMM's kernel for AVX-512 */
    for (int lane = 0; lane < 8; lane++) q[lane] = squares[lane] + squares[lane + 8];
    float square = ((q[0] + q[1]) + (q[2] + q[3])) + ((q[4] + q[5]) + (q[6] + q[7]));
    *sum += square / (float)dim;
    float scale = t->lr / (sqrtf(*sum) + t->eps);
    for (d = 0; d < dim; d++) g[d] *= scale;
    __asm__ volatile("" ::: "memory"); /* rounded here, as FBGEMM does */
    for (d = 0; d < dim; d++) weights[d] -= g[d];
}

static void OF(adagrad)(const Tables *t, int64_t table, const Entry *entries, int64_t count, const Lookup *lookups) {
    int64_t dim = t->dims[table];
    float *g = aligned_alloc(64, 4 * ((dim + 15) & ~15) + 64);
    if (!g) abort();
    for (int64_t first = 0, last; first < count; first = last) {
        for (last = first + 1; last < count && entries[last].row == entries[first].row;) last++;
        int64_t row = entries[first].row;
        if (first + AHEAD < count) {
            PREFETCH(t->weights[table], entries[first + AHEAD].row * dim);
            PREFETCH(t->state[table], entries[first + AHEAD].row);
        }
        OF(adagrad_row)(t, entries + first, last - first, entries + count, lookups, t->weights[table] + row * dim,
                        t->state[table] + row, dim, g);
    }
    free(g);
}

#undef AHEAD
#undef PREFETCH
#undef KEPT
#undef MOVED
#undef LANES
#undef EXCHANGE
#undef ROW
#undef Floats
#undef Ints
#undef Words
#undef Halves
#undef SPLAT
#undef AT
#undef OF
#undef JOIN
#undef JOIN_
#undef INLINE
