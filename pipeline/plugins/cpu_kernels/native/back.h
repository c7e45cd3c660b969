/* The backward pass of crosses.c: a span of the batch, and its gradients added up. Included by it alone, where AVX-512 is
   allowed. */

/* Memory of a span of the backward pass. Left bricks of samples, one row of bricks after the other; `_turned`: left
   bricks whose columns are the span's samples. */
typedef struct {
    char *grad, *grad_turned, *h, *h_turned, *mixed, *for_mixed, *for_mixed_turned, *for_h, *for_h_turned;
    char *for_crossed;              /* computed once, for h and for the features */
    char *for_gate;                 /* a brick of samples */
    char *crossed, *gates, *x;      /* right bricks of a feature's columns, whose rows are the samples */
    float *blocks;                  /* twice two: see back_feature */
    int64_t first, count;           /* bricks of samples */
    Gradients into;
} Back;

/* Add the sums of a brick's columns, or a block's. */
INLINE void add_columns(const char *brick, float *block, float *into) {
    __m512 even = _mm512_load_ps(into), odd = _mm512_load_ps(into + 16);
    for (int64_t r = 0; r < SIDE; r++) {
        even = _mm512_add_ps(even, brick ? half_of(row_at(brick, r), 0) : _mm512_load_ps(half(block, r, 0)));
        odd = _mm512_add_ps(odd, brick ? half_of(row_at(brick, r), 1) : _mm512_load_ps(half(block, r, 1)));
    }
    _mm512_store_ps(into, even);
    _mm512_store_ps(into + 16, odd);
}

/* Read the gradient, h and mixed of the brick of samples i of the span, and have the gradient of mixed. */
static void back_read(const Pass *w, const Back *k, int64_t i) {
    const Cross *t = &w->t;
    int64_t at = k->first + i, rows = rows_of(w, at), columns, stride = t->features * t->dim;
    char brick[BRICK] __attribute__((aligned(64)));
    for (int64_t v = 0; v < w->deep; v++) {
        char *grad = k->grad + (i * w->deep + v) * BRICK;
        int64_t column = first_of(w->vectors, v, &columns);
        fetch(t->grad + (at + 1) * SIDE * stride + column, stride);
        read_bf16(t->grad + at * SIDE * stride + column, stride, rows, columns, grad);
        turn_left(grad, k->grad_turned + (v * SPAN + i) * BRICK);
        add_columns(grad, NULL, k->into.out_bias + v * SIDE);
    }
    for (int64_t j = 0; j < w->low; j++) {
        char *h = k->h + (i * w->low + j) * BRICK;
        int64_t column = first_of(w->rank, j, &columns);
        read_bf16(t->h + at * SIDE * t->rank + column, t->rank, rows, columns, h);
        turn_left(h, k->h_turned + (j * SPAN + i) * BRICK);
    }
    for (int64_t j = 0; j < w->mid; j++) {
        char *for_mixed = k->for_mixed + (i * w->mid + j) * BRICK;
        int64_t column = first_of(w->mixtures, j, &columns);
        read_bf16(t->mixed + at * SIDE * t->mixtures + column, t->mixtures, rows, columns, brick);
        pair_rows(brick, k->mixed + (j * SPAN + i) * BRICK);
        Sum sum = sum_over(w->vectors, k->grad + i * w->deep * BRICK, w->back_spread + j * w->deep * BRICK);
        product(w, sum, nothing, NULL, k->blocks);
        add_columns(NULL, k->blocks, k->into.mix_bias + j * SIDE);
        round_block(k->blocks, for_mixed);
        turn_left(for_mixed, k->for_mixed_turned + (j * SPAN + i) * BRICK);
    }
}

/* The gradient of the crossed features: of samples i of the span, columns j. */
INLINE void back_crossed(const Pass *w, const Back *k, int64_t i, int64_t j, float *block) {
    int64_t feature = j / w->each, inside = j % w->each;
    const char *grad = k->grad + (i * w->deep + feature * w->tall) * BRICK;
    Sum own = sum_over(w->dim, grad, w->back_project + inside * w->tall * BRICK);
    Sum all = sum_over(w->mixtures, k->for_mixed + i * w->mid * BRICK, w->back_mix + j * w->mid * BRICK);
    product(w, own, all, NULL, block);
}

/* The gradient of the gate, from that of the crossed features, which is kept, rounded. */
static void back_gate(const Pass *w, const Back *k, int64_t i, int64_t j, float *block) {
    int64_t rows = rows_of(w, k->first + i), columns, stride = w->t.x_stride;
    const uint16_t *x = w->t.x + place(w, k->first + i, j, stride, &columns);
    char *for_crossed = k->for_crossed + (i * w->wide + j) * BRICK;
    __mmask32 here = lanes32(columns);
    for (int64_t r = 0; r < SIDE; r++, x += stride) {
        __m512i row = _mm512_maskz_loadu_epi16(r < rows ? here : 0, x);
        set_row(k->for_gate + j * BRICK, r, times(row, half(block, r, 0)));
        set_row(for_crossed, r, rounded(_mm512_load_ps(half(block, r, 0)), _mm512_load_ps(half(block, r, 1))));
    }
}

/* The gradient of h, of the brick of samples i of the span. */
static void back_h(const Pass *w, const Back *k, int64_t i) {
    for (int64_t j = 0; j <= w->wide; j++) {
        if (j < w->wide) {
            back_crossed(w, k, i, j, k->blocks + j % 2 * BLOCK);
            fetch_x(w, k->first + i + 1, j);
        }
        if (j) back_gate(w, k, i, j - 1, k->blocks + (j - 1) % 2 * BLOCK);
    }
    for (int64_t j = 0; j < w->low; j++) {
        char *for_h = k->for_h + (i * w->low + j) * BRICK;
        product(w, sum_over(w->values, k->for_gate, w->back_up + j * w->wide * BRICK), nothing, NULL, k->blocks);
        round_block(k->blocks, for_h);
        turn_left(for_h, k->for_h_turned + (j * SPAN + i) * BRICK);
    }
}

/* From a row of x, of the gradient of the crossed features and of both blocks: its crossed features, the gradient of its
   gate and, rounded, that of x. */
INLINE __m512i back_row(const float *block, __m512i x, __m512i for_crossed, __m512 crossed[2], __m512 gate[2],
                        __m512 sums[2]) {
    __m512 for_x[2];
    for (int v = 0; v < 2; v++) {
        __m512 g = _mm512_load_ps(block + 256 * v), c = half_of(for_crossed, v), values = half_of(x, v);
        crossed[v] = _mm512_mul_ps(values, g), gate[v] = _mm512_mul_ps(values, c);
        for_x[v] = _mm512_fmadd_ps(c, g, _mm512_load_ps(block + BLOCK + 256 * v));
        sums[v] = _mm512_add_ps(sums[v], gate[v]);
    }
    return rounded(for_x[0], for_x[1]);
}

/* Write a row of the gradient of x: past the caches where it is a whole line, since it is read much later. */
INLINE void write_row(uint16_t *to, __mmask32 here, __m512i row) {
    if (here == ~0u && (uintptr_t)to % 64 == 0)
        _mm512_stream_si512((void *)to, row);
    else
        _mm512_mask_storeu_epi16(to, here, row);
}

/* The elementwise part of samples i of the span, columns j: rows [low, high) of both blocks. */
static void back_rows(const Pass *w, const Back *k, int64_t i, int64_t j, const float *blocks, int64_t low,
                      int64_t high) {
    const Cross *t = &w->t;
    int64_t rows = rows_of(w, k->first + i), columns, stride = t->features * t->width;
    const uint16_t *x = t->x + place(w, k->first + i, j, t->x_stride, &columns);
    uint16_t *for_x = t->for_x + place(w, k->first + i, j, stride, &columns);
    const char *for_crossed = k->for_crossed + (i * w->wide + j) * BRICK;
    int64_t brick = (j % w->each * ROUND + i % ROUND) * BRICK;
    __mmask32 here = lanes32(columns);
    float *bias = k->into.gate_bias + j * SIDE;
    __m512 sums[2] = {_mm512_load_ps(bias), _mm512_load_ps(bias + 16)};
    for (int64_t r = low; r < high; r += 2) {
        __m512 crossed[2][2], gate[2][2];
        __m512i values[2];
        for (int q = 0; q < 2; q++) {
            values[q] = _mm512_maskz_loadu_epi16(r + q < rows ? here : 0, x + (r + q) * t->x_stride);
            const float *block = half((float *)blocks, r + q, 0);
            __m512i row = back_row(block, values[q], row_at(for_crossed, r + q), crossed[q], gate[q], sums);
            if (r + q < rows) write_row(for_x + (r + q) * stride, here, row);
        }
        set_pair(k->x + brick, r / 2, values[0], values[1]);
        for (int v = 0; v < 2; v++) {
            _mm512_store_si512(k->crossed + brick + 32 * r + v * TILE, rounded(crossed[0][v], crossed[1][v]));
            _mm512_store_si512(k->gates + brick + 32 * r + v * TILE, rounded(gate[0][v], gate[1][v]));
        }
    }
    _mm512_store_ps(bias, sums[0]);
    _mm512_store_ps(bias + 16, sums[1]);
}

/* Add to blocks of a gradient, or begin them: a turned left matrix, whose rows are an axis, times those of `count`
   bricks of samples at `right`. */
INLINE void back_weight(const Pass *w, const char *turned, const char *right, int64_t count, Axis rows, float *into,
                        int add) {
    for (int64_t i = 0; i < bricks_along(rows); i++) {
        Product p = {{{turned + i * SPAN * BRICK, right, count, 1, TILE}, nothing}, NULL, into + i * BLOCK, add, 0};
        first_of(rows, i, &p.rows);
        w->product(&p);
    }
}

/* One of both blocks of samples i of the span, columns j: the gate, and the part of the gradient of x that comes from
   h. */
INLINE void back_product(const Pass *w, const Back *k, int64_t i, int64_t j, int part, float *block) {
    int64_t left = i * w->low * BRICK, right = j * w->low * BRICK;
    if (part == 0)
        product(w, sum_over(w->rank, k->h + left, w->gate + right), nothing, w->gate_bias + j * SIDE, block);
    else
        product(w, sum_over(w->rank, k->for_h + left, w->back_down + right), nothing, NULL, block);
}

/* All columns of a feature, of samples [low, high) of the span. While the tiles multiply, the elementwise part of the
   brick before is computed, half of it after each product. */
static void back_feature(const Pass *w, const Back *k, int64_t feature, int64_t low, int64_t high) {
    int64_t from = feature * w->each, steps = (high - low) * w->each, i = low, j = from, i_before = 0, j_before = 0;
    for (int64_t step = 0; step <= steps; step++) {
        float *now = k->blocks + step % 2 * 2 * BLOCK, *before = k->blocks + (step + 1) % 2 * 2 * BLOCK;
        if (i + 1 < k->count)
            fetch_x(w, k->first + i + 1, j);
        else
            fetch_x(w, k->first, j + w->each);
        for (int part = 0; part < 2; part++) {
            if (step < steps) back_product(w, k, i, j, part, now + part * BLOCK);
            if (step) back_rows(w, k, i_before, j_before, before, part * SIDE / 2, (part + 1) * SIDE / 2);
        }
        i_before = i, j_before = j;
        if (++j == from + w->each) j = from, i++;
    }
}

/* Add the part of samples [low, high) of the span to the gradients of a feature's weights. */
static void back_weights(const Pass *w, const Back *k, int64_t feature, int64_t low, int64_t high) {
    int64_t count = high - low, at = low * BRICK, from = feature * w->each;
    for (int64_t e = 0; e < w->each; e++) {
        const char *crossed = k->crossed + e * ROUND * BRICK, *grad = k->grad_turned + feature * w->tall * SPAN * BRICK;
        float *project = k->into.project + e * w->tall * BLOCK, *mix = k->into.mix + (from + e) * w->mid * BLOCK;
        back_weight(w, grad + at, crossed, count, w->dim, project, low || feature);
        back_weight(w, k->for_mixed_turned + at, crossed, count, w->mixtures, mix, low > 0);
    }
    for (int64_t e = 0; e < w->each; e++) {
        float *up = k->into.up + (from + e) * w->low * BLOCK;
        back_weight(w, k->h_turned + at, k->gates + e * ROUND * BRICK, count, w->rank, up, low > 0);
    }
    for (int64_t e = 0; e < w->each; e++) {
        float *down = k->into.down + (from + e) * w->low * BLOCK;
        back_weight(w, k->for_h_turned + at, k->x + e * ROUND * BRICK, count, w->rank, down, low > 0);
    }
}

static void back_span(const Pass *w, const Back *k) {
    memset(k->into.gate_bias, 0, 4 * SIDE * w->wide);
    memset(k->into.out_bias, 0, 4 * SIDE * w->deep);
    memset(k->into.mix_bias, 0, 4 * SIDE * w->mid);
    for (int64_t i = 0; i < k->count; i++) back_read(w, k, i);
    for (int64_t i = 0; i < k->count; i++) back_h(w, k, i);
    for (int64_t feature = 0; feature < w->t.features; feature++) {
        int64_t low = 0;
        do {
            int64_t high = least(low + ROUND, k->count);
            back_feature(w, k, feature, low, high);
            back_weights(w, k, feature, low, high);
            low = high;
        } while (low < k->count);
    }
    for (int64_t j = 0; j < w->mid; j++) {
        float *spread = k->into.spread + j * w->deep * BLOCK;
        back_weight(w, k->grad_turned, k->mixed + j * SPAN * BRICK, k->count, w->vectors, spread, 0);
    }
    _mm_sfence();
}

/* Add up block (i, j) of a gradient over the spans, and write it where it belongs; `turned`: the other way round. */
static void collect(const Pass *w, const float *block, const Matrix *m, int64_t i, int64_t j, int turned) {
    int64_t rows, columns, row = first_of(m->rows, i, &rows), column = first_of(m->columns, j, &columns);
    int64_t stride = m->columns.groups * m->columns.width;
    float *to = (float *)m->values + row * stride + column;
    int64_t lines = turned ? columns : rows, across = turned ? rows : columns;
    const __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i apart = _mm512_mullo_epi32(count, _mm512_set1_epi32(turned ? (int)stride : 1));
    for (int64_t r = 0; r < lines; r++)
        for (int64_t v = 0; v < 2; v++) {
            const float *from = half((float *)block, r, v);
            __m512 sum = _mm512_load_ps(from);
            for (int64_t s = 1; s < w->spans; s++)
                sum = _mm512_add_ps(sum, _mm512_load_ps((const char *)from + s * w->gradient_bytes));
            float *line = turned ? to + v * stride + r : to + r * stride + v;
            _mm512_mask_i32scatter_ps(line, lanes16((across + 1 - v) / 2), apart, sum, 8);
        }
}
