/* The formulas of pipeline/plugins/shampoo/shampoo_steps.py on a CPU, block after block: what a block's step needs
   stays in the cache, where PyTorch makes a dozen passes over all blocks.

   Plain C with GCC's vector extensions; nothing of Python or torch is included. blocks.h is built for every CPU and
   for those with AVX2; which one is used is picked when it runs. Threads are OpenMP's, which are those of torch. Each takes
   whole blocks, so no result depends on their number. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define SHAMPOO_VERSION 1 /* pipeline/plugins/shampoo/native/__init__.py expects it */

/* Rows and columns of a parameter, or a whole vector, whose `rows` is 1. */
typedef struct {
    const float *gradient; /* rows `stride` values apart, as those of the parameter */
    float *parameter;
    float *direction;      /* [rows, columns], as all that follows */
    float *mean, *squares;
    double *left, *right;             /* [rows, rows], [columns, columns]; of a vector NULL, as the roots */
    const float *left_root, *right_root;
    int64_t rows, columns, stride;
    float rate, decay; /* the parameter's learning rate; rate * weight decay */
} Block;

typedef struct {
    double old, fresh; /* what remains of a factor, and the share of the new product */
} Factors;

typedef struct {
    float fresh;       /* share of the gradient in its mean */
    float correction;  /* a factor of the mean */
    float kept, added; /* of the squares: what remains, and the share of the new ones */
    float unbiased;    /* a factor of the squares */
    float eps;
    int32_t rooted;    /* whether the roots are used yet */
} Step;

#define NAME plain
#define BYTES 16
#include "blocks.h"
#undef NAME
#undef BYTES

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define X86 1
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define NAME avx2
#define BYTES 32
#include "blocks.h"
#undef NAME
#undef BYTES
#pragma GCC pop_options
#endif

static int allowed = 1;

int shampoo_version(void) { return SHAMPOO_VERSION; }

/* Limit the instruction set: 0 what every CPU has, 1 AVX2, whose products are as fast as those of AVX-512. */
void shampoo_limit(int level) { allowed = level; }

static int has_avx2(void) {
#ifdef X86
    __builtin_cpu_init();
    return allowed && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return 0;
#endif
}

#ifdef X86
#define PICK(function) (has_avx2() ? avx2_##function : plain_##function)
#else
#define PICK(function) plain_##function
#endif

static int64_t padded(int64_t n) { return (n + 15) & ~(int64_t)15; }

/* Call `work` with each block and its thread's memory; -1 where there is none. */
typedef void (*Work)(const Block *, const void *settings, double *memory);

static int on_all(Work work, const Block *blocks, int64_t count, const void *settings, int threads) {
    int64_t values = 16;
    int failed = 0;
    for (int64_t b = 0; b < count; b++) {
        int64_t most = padded(blocks[b].rows > blocks[b].columns ? blocks[b].rows : blocks[b].columns);
        if (blocks[b].left && 3 * most * most > values) values = 3 * most * most;
    }
#pragma omp parallel num_threads(threads)
    {
        double *memory = aligned_alloc(64, 8 * (size_t)values);
#pragma omp for schedule(dynamic, 1)
        for (int64_t b = 0; b < count; b++) {
            if (memory)
                work(blocks + b, settings, memory);
            else
                failed = -1;
        }
        free(memory);
    }
    return failed;
}

/* Take the gradients into the factors. */
int shampoo_accumulate(const Block *blocks, int64_t count, const Factors *factors, int threads) {
    return on_all((Work)PICK(accumulate), blocks, count, factors, threads);
}

/* Fill in the directions; updates means and squares. */
int shampoo_directions(const Block *blocks, int64_t count, const Step *step, int threads) {
    return on_all((Work)PICK(direction), blocks, count, step, threads);
}

/* Let the weights decay and move them along the directions. */
void shampoo_move(const Block *blocks, int64_t count, int threads) {
    void (*work)(const Block *) = PICK(move);
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t b = 0; b < count; b++) work(blocks + b);
}
