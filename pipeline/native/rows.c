/* What ingestion does to every lookup of a block, in one pass over memory each. Plain C, called through ctypes by
 * columns.py beside this file, which does the same with NumPy and Arrow where this is not installed: to the bit.
 *
 * A column comes as Arrow has it: values, and a bitmap of those that are there (none: all are), both from `offset` on.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define GOLDEN 0x9E3779B97F4A7C15ull
#define IN_CACHE 4096 /* rows mixed at a time */

typedef struct {
    const uint64_t *values;
    const uint8_t *present;
    int64_t offset;
    uint64_t none; /* stands for a value that is not there */
} Column;

typedef struct {
    uint64_t hash;
    int64_t code; /* -1: nothing here */
} Slot;

int32_t rows_version(void) { return 1; }

static inline int there(const uint8_t *present, int64_t i) {
    return !present || (present[i >> 3] >> (i & 7) & 1);
}

static Slot *slots_of(int bits) {
    Slot *slots = malloc(sizeof(Slot) << bits);
    if (slots)
        for (int64_t i = 0; i < (int64_t)1 << bits; i++) slots[i].code = -1;
    return slots;
}

static inline Slot *slot_of(Slot *slots, int bits, uint64_t hash) {
    uint64_t mask = ((uint64_t)1 << bits) - 1, at = (hash * GOLDEN) >> (64 - bits);
    while (slots[at].code >= 0 && slots[at].hash != hash) at = (at + 1) & mask;
    return slots + at;
}

/* Code each of n hashes by its place among the distinct ones, in the order in which these appear; one that is not there
 * gets their number. Returns that number, or -1 where there is no memory. `distinct` has room for n. */
int64_t rows_code(const Column *column, int64_t n, uint64_t *distinct, int32_t *codes) {
    const uint64_t *hashes = column->values + column->offset;
    int bits = 12;
    int64_t count = 0, absent = 0;
    Slot *slots = slots_of(bits);
    if (!slots) return -1;
    for (int64_t i = 0; i < n; i++) {
        if (!there(column->present, column->offset + i)) {
            codes[i] = -1;
            absent++;
            continue;
        }
        Slot *slot = slot_of(slots, bits, hashes[i]);
        if (slot->code < 0) {
            slot->hash = distinct[count] = hashes[i];
            slot->code = count++;
            codes[i] = (int32_t)(count - 1);
            if (count << 1 > (int64_t)1 << bits) {
                free(slots);
                slots = slots_of(++bits);
                if (!slots) return -1;
                for (int64_t k = 0; k < count; k++) {
                    Slot *again = slot_of(slots, bits, distinct[k]);
                    again->hash = distinct[k];
                    again->code = k;
                }
            }
        } else {
            codes[i] = (int32_t)slot->code;
        }
    }
    free(slots);
    if (absent)
        for (int64_t i = 0; i < n; i++)
            if (codes[i] < 0) codes[i] = (int32_t)count;
    return count;
}

/* How often each code occurs among the lookups that `keep` (bytes; none: all) marks, and where first. */
void rows_count(const int32_t *codes, const uint8_t *keep, int64_t n, int64_t *counts, int64_t *first) {
    for (int64_t i = 0; i < n; i++)
        if ((!keep || keep[i]) && !counts[codes[i]]++) first[codes[i]] = i;
}

/* out[i] = rows[codes[i]]; codes of `width` 2 or 4 bytes. */
void rows_take(const int32_t *rows, const void *codes, int32_t width, int64_t n, int32_t *out) {
    const uint16_t *narrow = codes;
    const uint32_t *wide = codes;
    if (width == 2)
        for (int64_t i = 0; i < n; i++) out[i] = rows[narrow[i]];
    else
        for (int64_t i = 0; i < n; i++) out[i] = rows[wide[i]];
}

static inline uint64_t mixed(uint64_t total, uint64_t word) {
    total = (total ^ word) * GOLDEN;
    return total ^ (total >> 32);
}

static void mix_in(uint64_t *total, const Column *column, int64_t from, int64_t n) {
    const uint64_t *words = column->values + column->offset + from;
    uint64_t copy[IN_CACHE];
    if (column->present) {
        for (int64_t i = 0; i < n; i++)
            copy[i] = there(column->present, column->offset + from + i) ? words[i] : column->none;
        words = copy;
    }
    for (int64_t i = 0; i < n; i++) total[i] = mixed(total[i], words[i]);
}

/* One hash of each of n rows over all `columns`. */
void rows_mix(const Column *columns, int64_t count, int64_t n, uint64_t *total) {
    memset(total, 0, n * sizeof(uint64_t));
    for (int64_t from = 0; from < n; from += IN_CACHE) {
        int64_t rows = n - from < IN_CACHE ? n - from : IN_CACHE;
        uint64_t *part = total + from;
        for (int64_t c = 0; c < count; c++) mix_in(part, columns + c, from, rows);
        for (int64_t i = 0; i < rows; i++) {
            uint64_t word = part[i];
            word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9ull;
            word = (word ^ (word >> 30)) * 0x94D049BB133111EBull;
            part[i] = word ^ (word >> 31);
        }
    }
}

/* A hash table of `size` (a power of two) places: keys and rows; a row of -1 marks an empty place. */
void rows_index(const uint64_t *hashes, const int32_t *rows, int64_t n, uint64_t *keys, int32_t *places,
                     int32_t bits) {
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    for (uint64_t i = 0; i <= mask; i++) places[i] = -1;
    for (int64_t i = 0; i < n; i++) {
        uint64_t at = (hashes[i] * GOLDEN) >> (64 - bits);
        while (places[at] >= 0 && keys[at] != hashes[i]) at = (at + 1) & mask;
        keys[at] = hashes[i];
        places[at] = rows[i];
    }
}

/* The row of each of n hashes, -1 for one that the table does not hold. */
void rows_find(const uint64_t *keys, const int32_t *places, int32_t bits, const uint64_t *hashes, int64_t n,
                    int32_t *out) {
    uint64_t mask = ((uint64_t)1 << bits) - 1;
    for (int64_t i = 0; i < n; i++) {
        uint64_t at = (hashes[i] * GOLDEN) >> (64 - bits);
        while (places[at] >= 0 && keys[at] != hashes[i]) at = (at + 1) & mask;
        out[i] = places[at];
    }
}

/* Smallest and largest of n whole numbers, their sum and that of their squares, exactly. Returns 0, and no sums, where
 * one is not whole or the squares may not fit. */
int32_t rows_sums(const double *values, int64_t n, double *bounds, int64_t *sums) {
    double least = values[0], most = values[0];
    int32_t whole = 1;
    for (int64_t i = 0; i < n; i++) {
        double value = values[i];
        least = value < least ? value : least;
        most = value > most ? value : most;
    }
    bounds[0] = least;
    bounds[1] = most;
    double large = least < -most ? -least : most;
    if (large < 1.0) large = 1.0;
    if (!(large * large * (double)n < 4611686018427387904.0)) return 0;
    int64_t total = 0, squares = 0;
    for (int64_t i = 0; i < n; i++) {
        int64_t value = (int64_t)values[i];
        whole &= (double)value == values[i];
        total += value;
        squares += value * value;
    }
    sums[0] = total;
    sums[1] = squares;
    return whole;
}

#define BUCKETS 65536

/* Count finite values, and those with a label above 0, by bucket of a Sketch. Returns the buckets in use (their numbers,
 * rows and clicks rise with the value), -1: no memory. */
int64_t rows_sketch(const double *values, const float *labels, int64_t n, uint16_t *used, int64_t *rows,
                         int64_t *clicks) {
    int32_t *counts = calloc(2 * BUCKETS, sizeof(int32_t));
    int64_t count = 0;
    if (!counts) return -1;
    for (int64_t i = 0; i < n; i++) {
        if (!(values[i] - values[i] == 0.0)) continue;
        float narrow = (float)values[i] + 0.0f; /* -0 counts as 0 */
        uint32_t bits;
        memcpy(&bits, &narrow, sizeof bits);
        bits >>= 16;
        bits = bits < BUCKETS / 2 ? bits + BUCKETS / 2 : BUCKETS - 1 - bits;
        counts[2 * bits + (labels[i] > 0.0f)]++;
    }
    for (int64_t bucket = 0; bucket < BUCKETS; bucket++) {
        const int32_t *of = counts + 2 * bucket;
        if (!(of[0] | of[1])) continue;
        used[count] = (uint16_t)bucket;
        rows[count] = (int64_t)of[0] + of[1];
        clicks[count++] = of[1];
    }
    free(counts);
    return count;
}

/* out[i] = the hash of lookup i where its row is one of `count` from `first` on, else 0. */
void rows_unseen(const int32_t *rows, const void *codes, int32_t width, const uint64_t *hashes, int64_t n,
                      int32_t first, int32_t count, uint64_t *out) {
    const uint16_t *narrow = codes;
    const uint32_t *wide = codes;
    for (int64_t i = 0; i < n; i++) {
        uint32_t place = (uint32_t)rows[i] - (uint32_t)first;
        out[i] = place < (uint32_t)count ? hashes[width == 2 ? narrow[i] : wide[i]] : 0;
    }
}

/* Write n values as float32; returns whether all of them have that value still. */
int32_t rows_narrow(const double *values, int64_t n, float *out) {
    int32_t same = 1;
    for (int64_t i = 0; i < n; i++) {
        out[i] = (float)values[i];
        same &= (double)out[i] == values[i] || values[i] != values[i];
    }
    return same;
}
