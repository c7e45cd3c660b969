/* Delimited text taken apart in one pass over its bytes, and the hashes of its fields. Plain C, called through ctypes by
 * text_kernels.py. Where this is not installed, pipeline/ingest/text.py and ids.py do the same by Polars: to the bit.
 *
 * Text becomes what Arrow calls string views: 16 bytes for each, a length and up to 12 bytes of text, or of a longer one
 * the first four, the number of a buffer and where it begins there (Apache Arrow: columnar format, variable-size binary
 * view layout). Hashes are xxhash64 (Collet: xxHash fast digest algorithm). Little-endian machines, as Arrow's files.
 */
#include <stdint.h>
#include <string.h>

#define INLINE 12 /* bytes of text that a view holds itself */
#define DIGITS 15 /* whole numbers of so many digits, and 10 to that power, are float64 to the last digit */

typedef struct {
    void *out;        /* float64, or views of 16 bytes: one for each line */
    uint8_t *present; /* of numbers: a bitmap, all 0 before; of text: none */
    int64_t rest;     /* how many numbers are not there; bytes of the texts that are longer than their views */
} Field;

typedef struct {
    int32_t length;
    uint8_t text[INLINE];
} View;

typedef struct {
    const View *views;
    const uint8_t *present; /* a bitmap; none: all are there */
    int64_t offset;         /* of the bitmap */
    const uint8_t *const *buffers;
} Texts;

int32_t fields_version(void) { return 1; }

#define EVERY 0x0101010101010101ull

/* The highest bit of the first byte of `word` that is 0; above it, bits may say so of others that are not. */
static inline uint64_t zero_in(uint64_t word) { return (word - EVERY) & ~word & EVERY << 7; }

/* Where the field at `at` ends; `stop` is behind the last line end. */
static inline const uint8_t *end_of(const uint8_t *at, const uint8_t *stop, uint8_t separator) {
    for (; stop - at >= 8; at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        uint64_t found = zero_in(word ^ EVERY * separator) | zero_in(word ^ EVERY * '\n');
        if (found) return at + (__builtin_ctzll(found) >> 3);
    }
    while (*at != separator && *at != '\n') at++;
    return at;
}

/* Write the number that `size` bytes spell as digits, with a point between them and a minus before them if they like.
 * Returns 0 where they spell another one, or nothing: a closer look has to say what that is. Both the digits and the
 * power of ten are exact, so their quotient is the float64 that is nearest (Clinger: How to read floating point numbers
 * accurately). */
static inline int number_of(const uint8_t *at, int64_t size, double *out) {
    static const double POWERS[] = {1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7, 1e8, 1e9, 1e10, 1e11, 1e12, 1e13, 1e14};
    const uint8_t *stop = at + size;
    int negative = *at == '-', digits = 0, point = -1;
    uint64_t whole = 0;
    if (size > DIGITS + 2) return 0;
    for (at += negative; at < stop; at++) {
        uint8_t digit = *at - '0';
        if (digit <= 9) {
            whole = whole * 10 + digit;
            digits++;
        } else if (*at == '.' && point < 0 && digits) {
            point = digits;
        } else {
            return 0;
        }
    }
    if (!digits || digits > DIGITS || point == digits) return 0;
    double value = (double)whole;
    if (point > 0) value /= POWERS[digits - point];
    *out = negative ? -value : value;
    return 1;
}

static inline void view_of(const uint8_t *text, const uint8_t *at, int64_t size, View *out) {
    out->length = (int32_t)size;
    if (size <= INLINE) {
        memset(out->text, 0, INLINE);
        memcpy(out->text, at, size);
        return;
    }
    int32_t place[2] = {0, (int32_t)(at - text)};
    memcpy(out->text, at, 4);
    memcpy(out->text + 4, place, sizeof place);
}

/* The same of text of at most 8 bytes behind which 8 more can be read. */
static inline void short_view_of(const uint8_t *at, int64_t size, View *out) {
    uint64_t word;
    memcpy(&word, at, 8);
    word &= size < 8 ? (1ull << 8 * size) - 1 : ~0ull;
    out->length = (int32_t)size;
    memcpy(out->text, &word, 8);
    memset(out->text + 8, 0, 4);
}

/* Take `lines` lines apart, `n` bytes that end with a line end, into `columns` fields each. Returns 0, or -1 where a line
 * has more or fewer, or a number is not a plain one. An empty field is no number. */
int32_t fields_split(const uint8_t *text, int64_t n, uint8_t separator, Field *fields, int64_t columns, int64_t lines) {
    const uint8_t *at = text, *stop = text + n;
    for (int64_t line = 0; line < lines; line++) {
        for (int64_t column = 0; column < columns; column++) {
            if (at == stop) return -1;
            Field *field = fields + column;
            const uint8_t *end = end_of(at, stop, separator);
            if ((*end == '\n') != (column == columns - 1)) return -1;
            int64_t size = end - at;
            if (field->present) {
                double *out = (double *)field->out + line;
                if (!size) {
                    *out = 0.0;
                    field->rest++;
                } else if (number_of(at, size, out)) {
                    field->present[line >> 3] |= 1 << (line & 7);
                } else {
                    return -1;
                }
            } else if (size <= 8 && stop - at >= 8) {
                short_view_of(at, size, (View *)field->out + line);
            } else {
                view_of(text, at, size, (View *)field->out + line);
                field->rest += size > INLINE ? size : 0;
            }
            at = end + 1;
        }
    }
    return at == stop ? 0 : -1;
}

/* Copy the texts that are longer than their views to `own`, so that a few of them do not keep all of `text`. */
void fields_own(const uint8_t *text, View *views, int64_t lines, uint8_t *own) {
    int32_t used = 0, place;
    for (View *view = views; view < views + lines; view++) {
        if (view->length <= INLINE) continue;
        memcpy(&place, view->text + 8, sizeof place);
        memcpy(own + used, text + place, view->length);
        memcpy(view->text + 8, &used, sizeof used);
        used += view->length;
    }
}

/* How often `byte` occurs. */
int64_t fields_count(const uint8_t *text, int64_t n, uint8_t byte) {
    int64_t total = 0;
    for (int64_t from = 0; from < n; from += 128) {
        uint8_t some = 0; /* of at most 128 bytes */
        int64_t bytes = n - from < 128 ? n - from : 128;
        for (int64_t i = 0; i < bytes; i++) some += text[from + i] == byte;
        total += some;
    }
    return total;
}

#define P1 0x9E3779B185EBCA87ull
#define P2 0xC2B2AE3D27D4EB4Full
#define P3 0x165667B19E3779F9ull
#define P4 0x85EBCA77C2B2AE63ull
#define P5 0x27D4EB2F165667C5ull

static inline uint64_t turned(uint64_t word, int bits) { return word << bits | word >> (64 - bits); }

static inline uint64_t round_of(uint64_t lane, uint64_t word) { return turned(lane + word * P2, 31) * P1; }

static inline uint64_t word_at(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

static uint64_t stripes_of(const uint8_t **at, const uint8_t *stop, uint64_t seed) {
    uint64_t lanes[4] = {seed + P1 + P2, seed + P2, seed, seed - P1};
    for (; stop - *at >= 32; *at += 32)
        for (int i = 0; i < 4; i++) lanes[i] = round_of(lanes[i], word_at(*at + 8 * i));
    uint64_t hash = turned(lanes[0], 1) + turned(lanes[1], 7) + turned(lanes[2], 12) + turned(lanes[3], 18);
    for (int i = 0; i < 4; i++) hash = (hash ^ round_of(0, lanes[i])) * P1 + P4;
    return hash;
}

static inline uint64_t hash_of(const uint8_t *at, int64_t size, uint64_t seed) {
    const uint8_t *stop = at + size;
    uint64_t hash = (size < 32 ? seed + P5 : stripes_of(&at, stop, seed)) + (uint64_t)size;
    for (; stop - at >= 8; at += 8) hash = turned(hash ^ round_of(0, word_at(at)), 27) * P1 + P4;
    if (stop - at >= 4) {
        uint32_t half;
        memcpy(&half, at, 4);
        hash = turned(hash ^ half * P1, 23) * P2 + P3;
        at += 4;
    }
    for (; at < stop; at++) hash = turned(hash ^ *at * P5, 11) * P1;
    hash = (hash ^ hash >> 33) * P2;
    hash = (hash ^ hash >> 29) * P3;
    return hash ^ hash >> 32;
}

/* The hash of each of n texts, 0 of one that is not there or whose hash is one of the `none`; `present`, a bitmap that is
 * all 0, marks the others. Returns how many are not there. */
int64_t fields_hash(const Texts *texts, int64_t n, uint64_t seed, const uint64_t *none, int64_t nones, uint64_t *out,
                    uint8_t *present) {
    int64_t absent = 0;
    for (int64_t i = 0; i < n; i++) {
        const View *view = texts->views + i;
        int64_t bit = texts->offset + i;
        int there = !texts->present || (texts->present[bit >> 3] >> (bit & 7) & 1);
        uint64_t hash = 0;
        if (there) {
            const uint8_t *at = view->text;
            if (view->length > INLINE) {
                int32_t place[2];
                memcpy(place, view->text + 4, sizeof place);
                at = texts->buffers[place[0]] + place[1];
            }
            hash = hash_of(at, view->length, seed);
            for (int64_t k = 0; k < nones; k++) there &= hash != none[k];
        }
        out[i] = there ? hash : 0;
        present[i >> 3] |= there << (i & 7);
        absent += !there;
    }
    return absent;
}
