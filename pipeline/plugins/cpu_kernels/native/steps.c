/* Parts of a training step on a CPU that PyTorch does in several passes: the dot interaction, the backward pass of bias
   and ReLU, pooled lookups, and row-wise Adagrad over the rows of a batch.

   Plain C with GCC's vector extensions; nothing of Python or torch is included, so that one build serves every version
   of both. steps.h is built once for each instruction set, and the best one is picked when it runs. Threads are
   OpenMP's, which are those of torch. No result depends on their number. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define STEPS_VERSION 3 /* step_kernels.py expects it */
#define SAMPLES 64      /* of a piece of work */
#define ROWS 256        /* of a sum over a batch: its parts are added up in order */

typedef struct {
    const void *first; /* [n, dim] `first_stride` values apart: float32 or bf16; NULL: the first one is in `rest` too */
    const float *rest; /* the other vectors side by side, `rest_stride` values apart */
    void *out;         /* [n, dim + pairs], rows `out_stride` values apart */
    const void *grad;  /* as out */
    void *grad_first;  /* [n, dim] */
    float *grad_rest;  /* [n, others, dim] */
    int64_t first_stride, rest_stride, out_stride, n, vectors, dim;
    int32_t bf16, threads;
} Interact;

typedef struct {
    const void *grad, *out; /* [n, width]; out NULL: there is no ReLU, and nothing is masked */
    void *masked;           /* [n, width] */
    float *sums;            /* [width] */
    int64_t n, width;
    int32_t bf16, threads;
} Mask;

typedef struct {
    const void *hidden; /* [n, width] */
    const float *weight;
    float *logits;      /* [n] */
    const float *grad;  /* [n] */
    void *grad_hidden;  /* [n, width] */
    float *sums;        /* [width + 1]: of the weight, then of the bias */
    int64_t n, width;
    float bias;
    int32_t bf16, threads;
} Head;

typedef struct {
    float *const *weights;          /* by table [rows, dim] */
    float *const *state;            /* by table [rows] */
    const int64_t *rows, *dims;     /* by table */
    const int64_t *table_of;        /* by feature, ascending */
    const int64_t *column;          /* by feature: the first one in `pooled` */
    const int64_t *ids, *offsets;   /* [ids_count], [features * batch + 1] */
    void *pooled;                   /* [batch, width]: the pooled rows, or their gradient; float32 or bf16 */
    int64_t tables, features, batch, width, ids_count;
    float lr, eps;
    int32_t mean, bf16, threads;
} Tables;

typedef struct { int32_t row, lookup; } Entry;
typedef struct { int64_t at; float share; } Lookup; /* where its gradient begins, and its share of the bag's */

#define NAME plain
#include "steps.h"
#undef NAME

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define X86 1
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define NAME avx2
#include "steps.h"
#undef NAME
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,fma,prefer-vector-width=512")
#define NAME avx512
#include "steps.h"
#undef NAME
#pragma GCC pop_options
#endif

static int allowed = 2;

int steps_version(void) { return STEPS_VERSION; }

/* Limit the instruction set: 0 what every CPU has, 1 AVX2, 2 all. */
void steps_limit(int level) { allowed = level; }

static int level(void) {
#ifdef X86
    __builtin_cpu_init();
    if (allowed > 1 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return 2;
    if (allowed > 0 && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}

#ifdef X86
#define PICK(function) (level() == 2 ? avx512_##function : level() == 1 ? avx2_##function : plain_##function)
#else
#define PICK(function) plain_##function
#endif

/* Call `work` with pieces of [0, n), each thread with memory for `floats` values; -1 where there is none. */
typedef void (*Piece)(const void *task, int64_t low, int64_t high, float *memory);

static int in_pieces(Piece work, const void *task, int64_t n, int64_t floats, int threads) {
    int failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *memory = aligned_alloc(64, (4 * (size_t)floats + 63) / 64 * 64);
#pragma omp for schedule(static)
        for (int64_t low = 0; low < n; low += SAMPLES) {
            if (memory)
                work(task, low, low + SAMPLES < n ? low + SAMPLES : n, memory);
            else
                failed = -1;
        }
        free(memory);
    }
    return failed;
}

static int64_t interact_floats(const Interact *t) {
    int64_t deep = (t->dim + 15) & ~15, wide = (t->vectors + 15) & ~15;
    return 2 * wide * deep + wide * wide + deep + (wide + 4) * (wide + 4) / 2 + 64;
}

int steps_interact(const Interact *task) {
    return in_pieces((Piece)PICK(interact), task, task->n, interact_floats(task), task->threads);
}

int steps_interact_back(const Interact *task) {
    return in_pieces((Piece)PICK(interact_back), task, task->n, interact_floats(task), task->threads);
}

/* Call `work` with parts of [0, n), which add up sums [width], and add these up in order; -1 without memory. */
static int summed(Piece work, const void *task, int64_t n, int64_t width, float *total, int threads) {
    int64_t parts = (n + ROWS - 1) / ROWS;
    float *sums = calloc((size_t)(parts * width + 16), 4);
    if (!sums) return -1;
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t part = 0; part < parts; part++)
        work(task, part * ROWS, (part + 1) * ROWS < n ? (part + 1) * ROWS : n, sums + part * width);
    for (int64_t column = 0; column < width; column++) total[column] = 0.0f;
    for (int64_t part = 0; part < parts; part++)
        for (int64_t column = 0; column < width; column++) total[column] += sums[part * width + column];
    free(sums);
    return 0;
}

int steps_mask(const Mask *task) {
    return summed((Piece)PICK(mask), task, task->n, task->width, task->sums, task->threads);
}

int steps_head(const Head *task) {
    void (*work)(const Head *, int64_t, int64_t) = PICK(head);
#pragma omp parallel for schedule(static) num_threads(task->threads)
    for (int64_t low = 0; low < task->n; low += ROWS) work(task, low, low + ROWS < task->n ? low + ROWS : task->n);
    return 0;
}

int steps_head_back(const Head *task) {
    return summed((Piece)PICK(head_back), task, task->n, task->width + 1, task->sums, task->threads);
}

/* Fill pooled; 1 where a row number is outside of its table. */
int steps_look_up(const Tables *task) {
    int wrong = 0;
    int (*work)(const Tables *, int64_t, int64_t) = PICK(look_up);
#pragma omp parallel for schedule(static) num_threads(task->threads)
    for (int64_t low = 0; low < task->batch; low += SAMPLES)
        if (!work(task, low, low + SAMPLES < task->batch ? low + SAMPLES : task->batch)) {
#pragma omp atomic write
            wrong = 1;
        }
    return wrong;
}

/* The lookups of a table's features: where each one's gradient is, and its row; those with row % parts == part. */
static int64_t entries_of(const Tables *t, int64_t first, int64_t last, int64_t parts, int64_t part, Entry *entries,
                          Lookup *lookups) {
    int64_t count = 0, number = 0;
    for (int64_t f = first; f < last; f++) {
        const int64_t *offsets = t->offsets + f * t->batch;
        for (int64_t sample = 0; sample < t->batch; sample++) {
            int64_t length = offsets[sample + 1] - offsets[sample];
            for (int64_t at = offsets[sample]; at < offsets[sample + 1]; at++, number++) {
                lookups[number] = (Lookup){sample * t->width + t->column[f], t->mean ? 1.0f / (float)length : 1.0f};
                if (parts == 1 || t->ids[at] % parts == part) entries[count++] = (Entry){(int32_t)t->ids[at], (int32_t)number};
            }
        }
    }
    return count;
}

/* Sort by row, keeping the order of equal rows. `other`: room for as many; returns where the result is. */
static Entry *sorted(Entry *entries, Entry *other, int64_t count, int64_t rows) {
    int bits = 1;
    while (bits < 31 && (int64_t)1 << bits < rows) bits++;
    int passes = (bits + 10) / 11, digit = (bits + passes - 1) / passes;
    for (int pass = 0; pass < passes; pass++) {
        int64_t starts[2048] = {0};
        int shift = pass * digit, mask = (1 << digit) - 1;
        for (int64_t e = 0; e < count; e++) starts[entries[e].row >> shift & mask]++;
        for (int64_t value = 0, before = 0; value <= mask; value++) {
            int64_t here = starts[value];
            starts[value] = before, before += here;
        }
        for (int64_t e = 0; e < count; e++) other[starts[entries[e].row >> shift & mask]++] = entries[e];
        Entry *swap = entries;
        entries = other, other = swap;
    }
    return entries;
}

static int adagrad_part(const Tables *t, int64_t table, int64_t parts, int64_t part,
                        void (*work)(const Tables *, int64_t, const Entry *, int64_t, const Lookup *)) {
    int64_t first = 0, last;
    while (first < t->features && t->table_of[first] < table) first++;
    for (last = first; last < t->features && t->table_of[last] == table;) last++;
    int64_t count = t->offsets[last * t->batch] - t->offsets[first * t->batch];
    if (!count) return 0;
    Entry *entries = malloc(2 * (size_t)count * sizeof(Entry));
    Lookup *lookups = malloc((size_t)count * sizeof(Lookup));
    if (entries && lookups) {
        int64_t own = entries_of(t, first, last, parts, part, entries, lookups);
        work(t, table, sorted(entries, entries + count, own, t->rows[table]), own, lookups);
    }
    int failed = entries && lookups ? 0 : -1;
    free(entries);
    free(lookups);
    return failed;
}

/* Train the rows of the batch; -1 where there is no memory. Row numbers are those of a lookup that returned 0. */
int steps_adagrad(const Tables *task) {
    int failed = 0;
    int64_t parts = task->tables && task->threads > 1 ? (2 * task->threads - 1) / task->tables + 1 : 1;
    void (*work)(const Tables *, int64_t, const Entry *, int64_t, const Lookup *) = PICK(adagrad);
#pragma omp parallel for schedule(dynamic, 1) num_threads(task->threads)
    for (int64_t each = 0; each < task->tables * parts; each++)
        if (adagrad_part(task, each / parts, parts, each % parts, work)) {
#pragma omp atomic write
            failed = -1;
        }
    return failed;
}
