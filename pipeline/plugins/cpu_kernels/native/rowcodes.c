/* Row-wise quantisation of embedding rows: the compiled form of pipeline/checkpoint/quantise.py.

   Plain C with GCC's vector extensions; nothing of Python or torch is included, so that one build serves every version
   of both. The lanes of lanes.h are built once for each instruction set, and the best one is picked when it runs. No
   operation is reordered or fused, so all of them give the same bits. */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ROWCODES_VERSION 2 /* quantisation_kernels.py expects it */

typedef struct {
    const float *rows; /* [n, columns], `stride` values apart */
    int64_t stride, n, columns;
    int32_t bits, steps, most, fits; /* the search: see Coding */
    float unit;                      /* of low and span: a power of two */
    uint8_t *codes;                  /* [n, row_bytes] */
    uint16_t *low, *span;            /* float16 [n] */
    int64_t row_bytes;
} Task;

/* float16 of a float32, rounded to nearest even as torch does. */
static uint16_t to_half(float value) {
    uint32_t bits, sign, half;
    memcpy(&bits, &value, 4);
    sign = (bits >> 16) & 0x8000u;
    bits &= 0x7fffffffu;
    if (bits >= 0x47800000u) return (uint16_t)(sign | (bits > 0x7f800000u ? 0x7e00u : 0x7c00u));
    if (bits < 0x38800000u) { /* subnormal: adding 2^-1 * 2^-13 aligns the mantissa, and the hardware rounds */
        float magnitude, aligned;
        memcpy(&magnitude, &bits, 4);
        aligned = magnitude + 0.5f;
        memcpy(&half, &aligned, 4);
        return (uint16_t)(sign | (half - 0x3f000000u));
    }
    half = bits - 0x38000000u;
    half += 0xfffu + ((half >> 13) & 1u);
    return (uint16_t)(sign | (half >> 13));
}

static float from_half(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, bits = half & 0x7fffu;
    float value;
    if (bits < 0x400u) {
        value = (float)bits * 0x1p-24f;
        memcpy(&bits, &value, 4);
    } else {
        bits = (bits << 13) + 0x38000000u;
    }
    bits |= sign;
    memcpy(&value, &bits, 4);
    return value;
}

#if defined(__x86_64__) && defined(__GNUC__)
#define X86 1
#endif

#define LANES_NAME encode_default
#define LANES 4
#include "lanes.h"
#undef LANES_NAME
#undef LANES

#ifdef X86
#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2")
#endif
#define LANES_NAME encode_avx2
#define LANES 8
#include "lanes.h"
#undef LANES_NAME
#undef LANES
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl")
#endif
#define LANES_NAME encode_avx512
#define LANES 16
#include "lanes.h"
#undef LANES_NAME
#undef LANES
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif
#endif

int rowcodes_version(void) { return ROWCODES_VERSION; }

/* The largest magnitude of each row's values. Magnitudes compare as their bits do, and the compiler makes vectors of
   integers' comparisons. */
void rowcodes_magnitudes(const Task *task, float *magnitudes) {
    for (int64_t i = 0; i < task->n; i++) {
        const float *row = task->rows + i * task->stride;
        int32_t most = 0;
        for (int64_t c = 0; c < task->columns; c++) {
            int32_t bits;
            memcpy(&bits, row + c, 4);
            bits &= 0x7fffffff;
            most = bits > most ? bits : most;
        }
        memcpy(magnitudes + i, &most, 4);
    }
}

/* Fill codes, low and span; -1 where there is no memory. `level` limits the instruction set: 0 none, 1 AVX2, 2 all. */
int rowcodes_encode(const Task *task, int level) {
#ifdef X86
    __builtin_cpu_init();
    if (level > 1 && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        return encode_avx512(task);
    if (level > 0 && __builtin_cpu_supports("avx2")) return encode_avx2(task);
#endif
    (void)level;
    return encode_default(task);
}
