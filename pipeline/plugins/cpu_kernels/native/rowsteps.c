/* Steps of table optimizers on the rows that a batch looked up: the compiled form of pipeline/embeddings/table_training.py.

   Plain C; nothing of Python or torch is included, so that one build serves every version of both. formulas.h is built
   once for each instruction set, and the best one is picked when it runs. No operation is reordered or fused, so all of
   them give the same bits. */

#include <fenv.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ROWSTEPS_VERSION 2 /* row_kernels.py expects it */
#define STATES 2           /* columns of state of a table, at most */
#define SETTINGS 6         /* figures of a formula, at most */
#define AHEAD 8            /* rows whose memory is asked for before their turn */

/* A table and what a batch looked up in it. Bag f * batch + b is that of feature f and sample b. */
typedef struct {
    float *weights;          /* [rows, width] */
    float *states[STATES];   /* [rows, widths[i]], `steps[i]` values from row to row */
    int64_t widths[STATES];  /* `width` or 1; 0 where there is no such column */
    int64_t steps[STATES];
    int64_t width;
    const int64_t *ids;
    const int64_t *offsets;  /* [features * batch + 1]: where the ids of each bag begin */
    const float *shares;     /* of the ids, or NULL: 1 each */
    const float *gradient;   /* of feature f and sample b: at b * stride + f * width */
    int64_t stride, batch, features;
    int32_t mean; /* a bag's embedding is the mean of its rows */
} Table;

/* The formulas, in the order of _FORMULAS of row_kernels.py. Row-wise Adagrad is in steps.c, with the lookups. */
enum { LAZY_ADAM, PARTIAL_ROWWISE_ADAM, FTRL };

/* The formula of a step and its figures, as `compiled_step` of its optimizer lists them. `lazy`: rows whose gradient is 0 stay as they are. */
typedef struct {
    int32_t formula, lazy;
    float settings[SETTINGS];
} Step;

/* What the threads of a call share: the next table that has none yet, and how they treat denormals. */
typedef struct {
    int64_t next;
    char environment[64]; /* fenv_t of the thread that called rowsteps_share */
} Share;

/* What a thread needs beside: the distinct rows of a table, in the order of their first lookup, and their gradients. */
typedef struct {
    int64_t *rows;  /* [n] */
    float *sums;    /* [n, width] */
    int32_t *slots; /* [a power of two]: number of the row + 1 by its hash, or 0 */
} Scratch;

static int64_t lookups_of(const Table *table) {
    return table->offsets[table->features * table->batch] - table->offsets[0];
}

/* log2 of the slots for n rows: at least twice as many. */
static int bits_for(int64_t n) {
    int bits = 4;
    while (((int64_t)1 << bits) < 2 * n) bits++;
    return bits;
}

#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#endif

#define NAMED(name) name##_default
#include "formulas.h"
#undef NAMED

#ifdef X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define NAMED(name) name##_avx2
#include "formulas.h"
#undef NAMED
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,prefer-vector-width=512")
#endif
#define NAMED(name) name##_avx512
#include "formulas.h"
#undef NAMED
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

int rowsteps_version(void) { return ROWSTEPS_VERSION; }

typedef void (*Learn)(const Table *, const Step *, Scratch *);

static Learn best(int level) {
#ifdef X86
    __builtin_cpu_init();
    if (level > 1 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return learn_avx512;
    if (level > 0 && __builtin_cpu_supports("avx2")) return learn_avx2;
#endif
    (void)level;
    return learn_default;
}

/* Begin a call: its threads will compute as the calling thread does. */
void rowsteps_share(Share *share) {
    fenv_t own;
    _Static_assert(sizeof own <= sizeof share->environment, "fenv_t");
    fegetenv(&own);
    memcpy(share->environment, &own, sizeof own);
    share->next = 0;
}

static int reserve(const Table *tables, int64_t count, Scratch *scratch) {
    int64_t rows = 1, values = 1;
    for (int64_t i = 0; i < count; i++) {
        int64_t n = lookups_of(tables + i);
        rows = n > rows ? n : rows;
        values = n * tables[i].width > values ? n * tables[i].width : values;
    }
    scratch->rows = malloc((size_t)rows * sizeof *scratch->rows);
    scratch->sums = malloc((size_t)values * sizeof *scratch->sums);
    scratch->slots = malloc(((size_t)1 << bits_for(rows)) * sizeof *scratch->slots);
    return scratch->rows && scratch->sums && scratch->slots;
}

/* Train those of `count` tables that no other thread of the call takes; -1 where there is no memory. `level` limits the
   instruction set: 0 none, 1 AVX2, 2 all. */
int rowsteps_learn(const Table *tables, int64_t count, const Step *step, Share *share, int level) {
    Learn learn = best(level);
    Scratch scratch;
    fenv_t own, shared;
    int reserved = reserve(tables, count, &scratch);
    fegetenv(&own);
    memcpy(&shared, share->environment, sizeof shared);
    fesetenv(&shared);
    while (reserved) {
        int64_t i = __atomic_fetch_add(&share->next, 1, __ATOMIC_RELAXED);
        if (i >= count) break;
        if (lookups_of(tables + i)) learn(tables + i, step, &scratch);
    }
    fesetenv(&own);
    free(scratch.rows);
    free(scratch.sums);
    free(scratch.slots);
    return reserved ? 0 : -1;
}
