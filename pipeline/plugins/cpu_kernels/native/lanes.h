/* Rows side by side, one in each lane: every figure of a row is a lane of a vector, so nothing is summed across lanes,
   and rows of any width keep all lanes busy. Included once for each instruction set: LANES float32 fit in one of its
   registers, and LANES_NAME is the function. */

#define JOIN_(a, b) a##_##b
#define JOIN(a, b) JOIN_(a, b)
#define OF(name) JOIN(LANES_NAME, name)
#define INLINE static inline __attribute__((always_inline))

typedef float OF(floats) __attribute__((vector_size(4 * LANES)));
typedef int32_t OF(ints) __attribute__((vector_size(4 * LANES)));
typedef uint32_t OF(words) __attribute__((vector_size(4 * LANES)));
#define Floats OF(floats)
#define Ints OF(ints)
#define Words OF(words)

/* Macros, as a function would have to pass vectors that its instruction set has no registers for. */
#define SPLAT(x) ((x) - (Floats){0})
#define SELECT(mask, a, b) ((Floats)(((mask) & (Ints)(a)) | (~(mask) & (Ints)(b))))
#define LESSER(a, b) SELECT((a) < (b), a, b)
#define GREATER(a, b) SELECT((a) > (b), a, b)
/* To nearest even, of 0 <= x < 2^22: the sum has no bits left for the fraction. */
#define NEAREST(x) (((x) + 12582912.0f) - 12582912.0f)

/* What one pass over the columns tells of the grid from `low` to `low + span`: the squared error in steps, and the sums
   that the next fit needs (of codes, of their squares, of codes times values). */
INLINE void OF(look)(const Floats *x, int64_t columns, Floats low, Floats span, float levels, Floats *error,
                     Floats *codes, Floats *squares, Floats *products) {
    const Floats zero = SPLAT(0.0f), top = SPLAT(levels), least = SPLAT(1.17549435e-38f * levels);
    const Floats inverse = levels / GREATER(span, least);
    Floats e = zero, s = zero, q = zero, p = zero;
    for (int64_t c = 0; c < columns; c++) {
        Floats place = (x[c] - low) * inverse, within = GREATER(place, zero);
        Floats code = LESSER(within, top);
        code = NEAREST(code);
        place = place - code;
        e = e + place * place;
        if (codes) {
            s = s + code;
            q = q + code * code;
            p = p + code * x[c];
        }
    }
    *error = e;
    if (codes) *codes = s, *squares = q, *products = p;
}

/* The greedy search of the paper: raise the low end or lower the high end by a step, whichever errs less. */
INLINE void OF(shrink)(const Floats *x, int64_t columns, float levels, int steps, int most, Floats *low, Floats *span,
                       Floats *error) {
    const Floats zero = SPLAT(0.0f), top = SPLAT(levels), least = SPLAT(1.17549435e-38f * levels);
    const Floats step = *span / (float)steps;
    Floats at = *low;
    for (int taken = 1; taken <= most; taken++) {
        const Floats now = step * (float)(steps - taken), inverse = levels / GREATER(now, least);
        const Floats raised = at + step, width = now / levels;
        Floats low_error = zero, high_error = zero;
        for (int64_t c = 0; c < columns; c++) {
            Floats a = (x[c] - raised) * inverse, b = (x[c] - at) * inverse;
            Floats code_a = GREATER(a, zero), code_b = GREATER(b, zero);
            code_a = LESSER(code_a, top);
            code_b = LESSER(code_b, top);
            a = a - NEAREST(code_a);
            b = b - NEAREST(code_b);
            low_error = low_error + a * a;
            high_error = high_error + b * b;
        }
        const Ints raise = low_error < high_error;
        at = SELECT(raise, raised, at);
        const Floats lesser = SELECT(raise, low_error, high_error) * (width * width);
        const Ints better = lesser < *error;
        *low = SELECT(better, at, *low);
        *span = SELECT(better, now, *span);
        *error = SELECT(better, lesser, *error);
    }
}

/* Lloyd's method on a grid: the range that serves the codes of the last one with least squares, and again. Values are
   relative to the row's least one, so that the sums lose no bits to what all values share. */
INLINE void OF(fit)(const Floats *x, int64_t columns, float levels, int fits, Floats *low, Floats *span, Floats *error) {
    const float n = (float)columns;
    Floats mean = SPLAT(0.0f), e, codes, squares, products, at = *low, now = *span;
    for (int64_t c = 0; c < columns; c++) mean = mean + x[c];
    mean = mean / n;
    for (int i = 0; i <= fits; i++) {
        OF(look)(x, columns, at, now, levels, &e, &codes, &squares, &products);
        const Floats width = now / levels;
        e = e * (width * width);
        const Ints better = e < *error;
        *low = SELECT(better, at, *low);
        *span = SELECT(better, now, *span);
        *error = SELECT(better, e, *error);
        if (i == fits) break;
        const Floats middle = codes / n, spread = squares - n * (middle * middle);
        const Floats scale = (products - n * (middle * mean)) / GREATER(spread, SPLAT(1e-6f));
        /* A row of one value has no codes to fit: its range stays. */
        const Ints fitted = scale > 0.0f;
        at = SELECT(fitted, mean - scale * middle, at);
        now = SELECT(fitted, scale * levels, now);
    }
}

/* Codes of the columns on the grid that float16 can name, into `out`; which rows use both of its ends. */
INLINE Ints OF(place)(const Floats *x, Floats *out, int64_t columns, Floats low, Floats high, float levels, float unit,
                      uint16_t *half_low, uint16_t *half_span) {
    const Floats zero = SPLAT(0.0f), top = SPLAT(levels);
    Floats bottom, width, least = top, largest = zero;
    for (int lane = 0; lane < LANES; lane++) {
        half_low[lane] = to_half(low[lane] / unit);
        half_span[lane] = to_half((high[lane] - low[lane]) / unit);
        bottom[lane] = from_half(half_low[lane]) * unit;
        width[lane] = from_half(half_span[lane]) * unit;
    }
    const Floats inverse = SELECT(width > zero, levels / width, zero);
    for (int64_t c = 0; c < columns; c++) {
        Floats code = (x[c] - bottom) * inverse;
        code = GREATER(code, zero);
        code = LESSER(code, top);
        out[c] = code = NEAREST(code);
        least = LESSER(code, least);
        largest = GREATER(code, largest);
    }
    return (least > zero) | (largest < top);
}

/* The codes of each lane's row as bytes, the first column in the lowest bits. */
INLINE void OF(pack)(const Floats *out, int64_t columns, int bits, int rows, uint8_t *codes, int64_t row_bytes) {
    const int group = bits == 8 ? 4 : 8, size = group * bits / 8;
    int64_t at = 0;
    for (int64_t c = 0; c < columns; c += group, at += size) {
        const int count = columns - c < group ? (int)(columns - c) : group;
        const int bytes = row_bytes - at < size ? (int)(row_bytes - at) : size;
        Words lower = {0}, upper = {0}; /* the group's codes from 0 on, and from half of it on */
        for (int i = 0; i < count; i++) {
            const Words code = __builtin_convertvector(out[c + i], Words);
            if (i < group / 2)
                lower |= code << (uint32_t)(i * bits);
            else
                upper |= code << (uint32_t)((i - group / 2) * bits);
        }
        for (int lane = 0; lane < rows; lane++) {
            const uint64_t word = (uint64_t)lower[lane] | (uint64_t)upper[lane] << (group / 2 * bits);
            uint8_t *into = codes + lane * row_bytes + at;
            for (int byte = 0; byte < bytes; byte++) into[byte] = (uint8_t)(word >> (8 * byte));
        }
    }
}

static int LANES_NAME(const Task *task) {
    const int64_t columns = task->columns;
    const float levels = (float)((1 << task->bits) - 1);
    const size_t bytes = (size_t)(2 * columns + 1) * sizeof(Floats);
    Floats *x = aligned_alloc(64, (bytes + 63) / 64 * 64); /* C11: a size that is a multiple of the alignment */
    uint16_t half_low[LANES], half_span[LANES];
    if (!x) return -1;
    Floats *out = x + columns;
    for (int64_t first = 0; first < task->n; first += LANES) {
        const int rows = task->n - first < LANES ? (int)(task->n - first) : LANES;
        for (int lane = 0; lane < LANES; lane++) {
            const int64_t at = first + (lane < rows ? lane : rows - 1);
            const float *row = task->rows + at * task->stride;
            for (int64_t c = 0; c < columns; c++) ((float *)(x + c))[lane] = row[c];
        }
        Floats low = x[0], high = x[0], error;
        for (int64_t c = 1; c < columns; c++) {
            low = LESSER(x[c], low);
            high = GREATER(x[c], high);
        }
        const Floats plain_low = low, plain_high = high;
        if (task->steps || task->fits) {
            Floats span = high - low;
            OF(look)(x, columns, low, span, levels, &error, 0, 0, 0);
            error = error * ((span / levels) * (span / levels));
            if (task->steps) OF(shrink)(x, columns, levels, task->steps, task->most, &low, &span, &error);
            if (task->fits) OF(fit)(x, columns, levels, task->fits, &low, &span, &error);
            high = low + span;
        }
        /* A grid must be used to both ends, or decoded rows would have another plain range: see quantise.py. */
        const Ints unused = OF(place)(x, out, columns, low, high, levels, task->unit, half_low, half_span);
        if (task->steps || task->fits) {
            low = SELECT(unused, plain_low, low);
            high = SELECT(unused, plain_high, high);
            OF(place)(x, out, columns, low, high, levels, task->unit, half_low, half_span);
        }
        memcpy(task->low + first, half_low, sizeof(uint16_t) * (size_t)rows);
        memcpy(task->span + first, half_span, sizeof(uint16_t) * (size_t)rows);
        OF(pack)(out, columns, task->bits, rows, task->codes + first * task->row_bytes, task->row_bytes);
    }
    free(x);
    return 0;
}

#undef OF
#undef JOIN
#undef JOIN_
#undef INLINE
#undef SPLAT
#undef SELECT
#undef LESSER
#undef GREATER
#undef NEAREST
#undef Floats
#undef Ints
#undef Words
