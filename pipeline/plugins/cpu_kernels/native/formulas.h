/* The passes over one table for one instruction set; rowsteps.c includes this file with NAMED defined. The formulas are
   those of pipeline/embeddings/table_optimizers.py, with their operations in the same order. */

/* `body` for each i of a row: whole vectors first. */
#define EACH(body)                                       \
    do {                                                 \
        int64_t first = 0;                               \
        for (; first + 16 <= width; first += 16)         \
            for (int64_t j = 0; j < 16; j++) {           \
                int64_t i = first + j;                   \
                body                                     \
            }                                            \
        for (int64_t i = first; i < width; i++) { body } \
    } while (0)

static inline void NAMED(lazy_adam)(float *restrict w, float *restrict m, float *restrict v, const float *restrict g,
                                    int64_t width, const float *k) {
    const float new1 = k[0], old2 = k[1], new2 = k[2], eps = k[3], rate = k[4];
    EACH({
        m[i] += new1 * (g[i] - m[i]);
        v[i] = v[i] * old2 + new2 * g[i] * g[i];
        w[i] += rate * m[i] / (sqrtf(v[i]) + eps);
    });
}

static inline void NAMED(partial_rowwise_adam)(float *restrict w, float *restrict m, float *restrict v,
                                               const float *restrict g, int64_t width, const float *k) {
    const float new1 = k[0], new2 = k[1], unbiased = k[2], eps = k[3], rate = k[4];
    float squares[16] = {0}, sum = 0.0f, spread;
    EACH({ squares[i & 15] += g[i] * g[i]; });
    for (int j = 0; j < 16; j++) sum += squares[j];
    *v += new2 * (sum / (float)width - *v);
    spread = sqrtf(*v / unbiased) + eps;
    EACH({
        m[i] += new1 * (g[i] - m[i]);
        w[i] += rate * m[i] / spread;
    });
}

static inline void NAMED(ftrl)(float *restrict w, float *restrict z, float *restrict n, const float *restrict g,
                               int64_t width, const float *k) {
    const float lr = k[0], l1 = k[1], l2 = k[2], beta = k[3], inverse = k[4];
    EACH({
        float held = z[i];
        float before = sqrtf(n[i]);
        float sum = n[i] + g[i] * g[i];
        float after = sqrtf(sum);
        float sign = (float)((w[i] > 0.0f) - (w[i] < 0.0f));
        float implied = -(w[i] * ((before + beta) / lr + l2) + l1 * sign);
        float next = (w[i] != 0.0f ? implied : held) + g[i] + inverse * w[i] * (after - before);
        float beyond = fabsf(next) - l1;
        float shrunk = (float)((next > 0.0f) - (next < 0.0f)) * (beyond > 0.0f ? beyond : 0.0f);
        n[i] = sum;
        z[i] = next;
        w[i] = -(shrunk / ((after + beta) / lr + l2));
    });
}

static inline int NAMED(all_zero)(const float *g, int64_t width) {
    int other = 0;
    EACH({ other |= g[i] != 0.0f; });
    return !other;
}

/* The number of distinct rows of a batch, which it leaves in `scratch` with their gradients: sums in the order of the
   lookups. */
static int64_t NAMED(sum)(const Table *table, Scratch *scratch) {
    const int64_t width = table->width;
    const int bits = bits_for(lookups_of(table));
    const uint64_t last = ((uint64_t)1 << bits) - 1;
    int64_t count = 0;
    memset(scratch->slots, 0, ((size_t)1 << bits) * sizeof *scratch->slots);
    for (int64_t bag = 0; bag < table->features * table->batch; bag++) {
        const int64_t from = table->offsets[bag], to = table->offsets[bag + 1];
        const int64_t feature = bag / table->batch, sample = bag - feature * table->batch;
        const float *restrict g = table->gradient + sample * table->stride + feature * width;
        const float whole = table->mean && to > from ? 1.0f / (float)(to - from) : 1.0f;
        __builtin_prefetch(g + AHEAD * table->stride);
        for (int64_t at = from; at < to; at++) {
            const int64_t row = table->ids[at];
            const float share = table->shares ? table->shares[at] * whole : whole;
            uint64_t place = ((uint64_t)row * 0x9e3779b97f4a7c15u) >> (64 - bits);
            while (scratch->slots[place] && scratch->rows[scratch->slots[place] - 1] != row) place = (place + 1) & last;
            if (scratch->slots[place]) {
                float *restrict sums = scratch->sums + (scratch->slots[place] - 1) * width;
                EACH({ sums[i] += share * g[i]; });
            } else {
                float *restrict sums = scratch->sums + count * width;
                EACH({ sums[i] = share * g[i]; });
                scratch->rows[count++] = row;
                scratch->slots[place] = (int32_t)count;
            }
        }
    }
    return count;
}

/* Ask for the memory of `row`. */
static inline void NAMED(fetch)(const Table *table, int64_t row) {
    for (int64_t i = 0; i < table->width; i += 16) __builtin_prefetch(table->weights + row * table->width + i, 1);
    for (int s = 0; s < STATES; s++)
        for (int64_t i = 0; i < table->widths[s]; i += 16)
            __builtin_prefetch(table->states[s] + row * table->steps[s] + i, 1);
}

static inline void NAMED(row_step)(const Table *table, const Step *step, int64_t row, const float *g) {
    const int64_t width = table->width;
    float *w = table->weights + row * width, *one = table->states[0] + row * table->steps[0];
    float *two = table->states[1] + row * table->steps[1];
    switch (step->formula) {
    case LAZY_ADAM: NAMED(lazy_adam)(w, one, two, g, width, step->settings); break;
    case PARTIAL_ROWWISE_ADAM: NAMED(partial_rowwise_adam)(w, one, two, g, width, step->settings); break;
    case FTRL: NAMED(ftrl)(w, one, two, g, width, step->settings); break;
    default: abort();
    }
}

static void NAMED(learn)(const Table *table, const Step *step, Scratch *scratch) {
    const int64_t count = NAMED(sum)(table, scratch);
    for (int64_t i = 0; i < AHEAD && i < count; i++) NAMED(fetch)(table, scratch->rows[i]);
    for (int64_t i = 0; i < count; i++) {
        const float *g = scratch->sums + i * table->width;
        if (i + AHEAD < count) NAMED(fetch)(table, scratch->rows[i + AHEAD]);
        if (!step->lazy || !NAMED(all_zero)(g, table->width)) NAMED(row_step)(table, step, scratch->rows[i], g);
    }
}

#undef EACH
