/* What ingestion does to every lookup of a block, in one pass over memory each. Plain C, called through ctypes by
 * column_kernels.py. Where this is not installed, pipeline/ingest does the same with NumPy and Arrow: to the bit.
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

int32_t rows_version(void) { return 3; }

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

/* The whole number below `size` that is at i, -1 where there is none: 0 is not -0. */
static inline int64_t small_at(const Column *column, int64_t i, int64_t size) {
    double value;
    memcpy(&value, column->values + column->offset + i, sizeof value);
    if (!(value >= 0.0 && value < (double)size)) return -1;
    int64_t whole = (int64_t)value;
    return (double)whole == value && (whole || !column->values[column->offset + i]) ? whole : -1;
}

/* out[i] = table[value] of n numbers that are whole and below `size`, `none` where there is no number; `rest` gets the
 * places of the others. Returns how many these are, -1 where they are more than `most`. */
int64_t rows_look_up(const Column *column, int64_t n, const float *table, int64_t size, int64_t most, float none,
                     float *out, int64_t *rest) {
    int64_t others = 0;
    for (int64_t i = 0; i < n; i++) {
        if (!there(column->present, column->offset + i)) {
            out[i] = none;
            continue;
        }
        int64_t whole = small_at(column, i, size);
        if (whole >= 0)
            out[i] = table[whole];
        else if (others == most)
            return -1;
        else
            rest[others++] = i;
    }
    return others;
}

/* Likewise smallest and largest of the table's values, their sum and that of their squares. What is not there is left
 * out. */
int64_t rows_look_up_sums(const Column *column, int64_t n, const int32_t *table, int64_t size, int64_t most,
                          int32_t *bounds, int64_t *sums, int64_t *rest) {
    int64_t others = 0, total = 0, squares = 0;
    bounds[0] = INT32_MAX;
    bounds[1] = INT32_MIN;
    for (int64_t i = 0; i < n; i++) {
        if (!there(column->present, column->offset + i)) continue;
        int64_t whole = small_at(column, i, size);
        if (whole >= 0) {
            int64_t value = table[whole];
            bounds[0] = value < bounds[0] ? (int32_t)value : bounds[0];
            bounds[1] = value > bounds[1] ? (int32_t)value : bounds[1];
            total += value;
            squares += value * value;
        } else if (others == most) {
            return -1;
        } else {
            rest[others++] = i;
        }
    }
    sums[0] = total;
    sums[1] = squares;
    return others;
}

#define EXPONENTS 2048 /* of a float64 */
#define LEAST_EXPONENT 543 /* below it, the rounding error of a square is no float64: other code sums such values */

typedef unsigned __int128 Wide;

/* Exact sums of n finite values (at most 2^20) and of their squares, by exponent: whole numbers of 128 bits, in halves,
 * low before high, of the sum (signed) and of the squares. A value is mantissa * 2^(exponent - 1075). Returns how many
 * exponents there are, -1 where a value is too small or too large. The arrays have room for EXPONENTS of them. */
int64_t rows_exact(const double *values, int64_t n, int32_t *exponents, uint64_t *words) {
    Wide sums[EXPONENTS], squares[EXPONENTS];
    int32_t least = EXPONENTS, most = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t bits;
        memcpy(&bits, values + i, sizeof bits);
        int32_t exponent = (int32_t)(bits >> 52 & 2047);
        if (!(bits << 1)) continue;
        if (exponent < LEAST_EXPONENT || exponent > 2 * 1023 - LEAST_EXPONENT) return -1;
        least = exponent < least ? exponent : least;
        most = exponent > most ? exponent : most;
    }
    for (int32_t exponent = least; exponent <= most; exponent++) sums[exponent] = squares[exponent] = 0;
    for (int64_t i = 0; i < n; i++) {
        uint64_t bits;
        memcpy(&bits, values + i, sizeof bits);
        if (!(bits << 1)) continue;
        uint64_t mantissa = (bits & ((1ull << 52) - 1)) | 1ull << 52;
        int32_t exponent = (int32_t)(bits >> 52 & 2047);
        sums[exponent] += bits >> 63 ? -(Wide)mantissa : (Wide)mantissa;
        squares[exponent] += (Wide)mantissa * mantissa;
    }
    int64_t count = 0;
    for (int32_t exponent = least; exponent <= most; exponent++) {
        if (!squares[exponent]) continue;
        exponents[count] = exponent;
        uint64_t *at = words + 4 * count++;
        at[0] = (uint64_t)sums[exponent];
        at[1] = (uint64_t)(sums[exponent] >> 64);
        at[2] = (uint64_t)squares[exponent];
        at[3] = (uint64_t)(squares[exponent] >> 64);
    }
    return count;
}

#define BUCKETS 65536
#define FEW 16384 /* values that are sooner sorted than counted in an array of all buckets */
#define DIGIT 512

/* A finite value's bucket of a Sketch, times two, and whether its label is above 0; -1: it is not finite. */
static inline int32_t key_of(double value, float label) {
    if (!(value - value == 0.0)) return -1;
    float narrow = (float)value + 0.0f; /* -0 counts as 0 */
    uint32_t bits;
    memcpy(&bits, &narrow, sizeof bits);
    bits >>= 16;
    bits = bits < BUCKETS / 2 ? bits + BUCKETS / 2 : BUCKETS - 1 - bits;
    return (int32_t)(2 * bits + (label > 0.0f));
}

static int64_t sketch_few(const double *values, const float *labels, int64_t n, uint16_t *used, int64_t *rows,
                          int64_t *clicks) {
    int32_t *keys = malloc(2 * n * sizeof(int32_t));
    int64_t low[DIGIT] = {0}, high[DIGIT] = {0}, finite = 0, count = 0;
    if (!keys) return -1;
    int32_t *sorted = keys + n;
    for (int64_t i = 0; i < n; i++) {
        int32_t key = key_of(values[i], labels[i]);
        if (key < 0) continue;
        keys[finite++] = key;
        low[key % DIGIT]++;
        high[key / DIGIT]++;
    }
    for (int64_t digit = 0, below = 0, above = 0; digit < DIGIT; digit++) {
        int64_t here = low[digit], there = high[digit];
        low[digit] = below;
        high[digit] = above;
        below += here;
        above += there;
    }
    for (int64_t i = 0; i < finite; i++) sorted[low[keys[i] % DIGIT]++] = keys[i];
    for (int64_t i = 0; i < finite; i++) keys[high[sorted[i] / DIGIT]++] = sorted[i];
    for (int64_t i = 0; i < finite; i++) {
        if (!i || keys[i] >> 1 != keys[i - 1] >> 1) {
            used[count] = (uint16_t)(keys[i] >> 1);
            rows[count] = clicks[count] = 0;
            count++;
        }
        rows[count - 1]++;
        clicks[count - 1] += keys[i] & 1;
    }
    free(keys);
    return count;
}

/* Count finite values, and those with a label above 0, by bucket of a Sketch. Returns the buckets in use (their numbers,
 * rows and clicks rise with the value), -1: no memory. */
int64_t rows_sketch(const double *values, const float *labels, int64_t n, uint16_t *used, int64_t *rows,
                    int64_t *clicks) {
    if (n < FEW) return sketch_few(values, labels, n, used, rows, clicks);
    int32_t *counts = calloc(2 * BUCKETS, sizeof(int32_t));
    int64_t count = 0;
    if (!counts) return -1;
    for (int64_t i = 0; i < n; i++) {
        int32_t key = key_of(values[i], labels[i]);
        if (key >= 0) counts[key]++;
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

/* The buckets of two sketches, and the sums of their rows and clicks. Returns how many there are. */
int64_t rows_merge(const uint16_t *used, const int64_t *rows, const int64_t *clicks, int64_t n, const uint16_t *more,
                   const int64_t *more_rows, const int64_t *more_clicks, int64_t m, uint16_t *all, int64_t *all_rows,
                   int64_t *all_clicks) {
    int64_t i = 0, k = 0, count = 0;
    while (i < n || k < m) {
        int take = i < n && (k == m || used[i] <= more[k]), too = k < m && (i == n || more[k] <= used[i]);
        all[count] = take ? used[i] : more[k];
        all_rows[count] = (take ? rows[i] : 0) + (too ? more_rows[k] : 0);
        all_clicks[count++] = (take ? clicks[i] : 0) + (too ? more_clicks[k] : 0);
        i += take;
        k += too;
    }
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
