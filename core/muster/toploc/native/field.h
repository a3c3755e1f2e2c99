/* Polynomials over GF(65497) in doubles that hold integers.
 *
 * Reduction leaves a magnitude of at most P/2 + 1, so a sum of 65497 products is below 2^53 and every
 * operation is exact, in any order, with or without fused multiply-add: vectors of any width give the
 * same result. Counts are multiples of STEP; loops of STEP are unrolled into the lane loop around
 * them.
 *
 * Interpolation. With M = prod (X - x_i), c_i = y_i / M'(x_i) and the power sums
 * S_t = sum c_i x_i^t, the coefficient of X^j is the sum over t of M_(j+1+t) S_t.
 */

#ifndef MUSTER_TOPLOC_FIELD_H
#define MUSTER_TOPLOC_FIELD_H

#include "portable.h"

enum { STEP = 16 };

typedef struct {
    double *x, *y;       /* [count] points; x beyond the last is 0 */
    double *power;       /* [STEP + 1][count] x^0 ... x^16 */
    double *row;         /* [count][STEP] x^0 ... x^15, those of a point side by side */
    double *product;     /* [roots_room] coefficients of M, lowest first, then zeros */
    double *spare;       /* [roots_room] */
    double *weight;      /* [count] c */
    double *sums;        /* [count] S */
    double *coefficient; /* [count] of the polynomial, lowest first, then zeros */
} Field;

static size_t whole_steps(size_t points) { return (points + STEP - 1) / STEP * STEP; }

static size_t roots_room(size_t count) { return 2 * count + 2 * STEP; }

INLINE double reduce(double value) {
    /* Adding and taking away 1.5 * 2^52 rounds to an integer. */
    double quotient = value * (1.0 / PRIME) + 6755399441055744.0 - 6755399441055744.0;
    return value - quotient * PRIME;
}

INLINE uint32_t residue(double value) {
    int32_t integer = (int32_t)reduce(value);
    return (uint32_t)(integer < 0 ? integer + (int32_t)PRIME : integer);
}

INLINE void list_powers(const double *restrict x, size_t count, double *restrict power) {
    for (size_t i = 0; i < count; i++) {
        power[i] = 1;
        power[count + i] = x[i];
    }
    for (size_t e = 2; e <= STEP; e++) {
        const double *low = power + e / 2 * count, *high = power + (e - e / 2) * count;
        for (size_t i = 0; i < count; i++)
            power[e * count + i] = reduce(low[i] * high[i]);
    }
}

/* Values of a polynomial of `terms` coefficients at the `count` points whose powers are given:
 * Horner's rule in x^16. */
INLINE void evaluate(const double *restrict coefficient, size_t terms,
                     const double *restrict power, size_t count, double *restrict value) {
    memset(value, 0, count * sizeof *value);
    for (size_t block = terms; block; block -= STEP)
        for (size_t i = 0; i < count; i++) {
            double sum = value[i] * power[STEP * count + i];
            for (size_t e = 0; e < STEP; e++)
                sum += coefficient[block - STEP + e] * power[e * count + i];
            value[i] = reduce(sum);
        }
}

/* factor[d][g] = coefficient of X^d in the product of STEP of the (X - x), for each group g. */
INLINE void expand_groups(const double *restrict x, size_t groups, double *restrict factor) {
    for (size_t g = 0; g < groups; g++)
        factor[g] = 1;
    for (size_t degree = 0; degree < STEP; degree++) {
        const double *root = x + degree * groups;
        memcpy(factor + (degree + 1) * groups, factor + degree * groups, groups * sizeof *factor);
        for (size_t d = degree; d; d--)
            for (size_t g = 0; g < groups; g++)
                factor[d * groups + g] =
                    reduce(factor[(d - 1) * groups + g] - root[g] * factor[d * groups + g]);
        for (size_t g = 0; g < groups; g++)
            factor[g] = reduce(-root[g] * factor[g]);
    }
}

/* to = from times the group's factor, for `terms` coefficients; both begin with STEP zeros. */
INLINE void multiply_group(const double *restrict factor, size_t stride, size_t terms,
                           const double *restrict from, double *restrict to) {
    double own[STEP];
    for (size_t d = 0; d < STEP; d++)
        own[d] = factor[d * stride];
    for (size_t j = STEP; j < STEP + terms; j++) {
        double sum = from[j - STEP];
        for (size_t d = 0; d < STEP; d++)
            sum += own[d] * from[j - d];
        to[j] = reduce(sum);
    }
}

/* Returns the coefficients of prod (X - x) over k points. */
INLINE const double *expand_roots(Field *f, size_t k) {
    size_t count = whole_steps(k), groups = count / STEP;
    double *from = f->spare, *to = f->product;
    expand_groups(f->x, groups, f->row);
    memset(from, 0, roots_room(count) * sizeof *from);
    memset(to, 0, roots_room(count) * sizeof *to);
    from[STEP] = 1;
    for (size_t g = 0; g < groups; g++) {
        multiply_group(f->row + g, groups, (g + 1) * STEP + 1, from, to);
        double *product = to;
        to = from;
        from = product;
    }
    /* The roots that fill up the last step are 0: they shift by one place each. */
    return from + STEP + (count - k);
}

/* value = 1 / value, by Fermat's little theorem; 0 stays 0. */
INLINE void invert(double *restrict value, double *restrict base, size_t count) {
    memcpy(base, value, count * sizeof *value);
    for (int bit = 14; bit >= 0; bit--) {
        for (size_t i = 0; i < count; i++)
            value[i] = reduce(value[i] * value[i]);
        if ((PRIME - 2) >> bit & 1)
            for (size_t i = 0; i < count; i++)
                value[i] = reduce(value[i] * base[i]);
    }
}

INLINE void transpose(const double *restrict power, size_t count, double *restrict row) {
    for (size_t i = 0; i < count; i++)
        for (size_t e = 0; e < STEP; e++)
            row[i * STEP + e] = power[e * count + i];
}

/* sums[t] = sum over i of weight_i x_i^t, where leap_i = x_i^16; the weights are spent. */
INLINE void sum_powers(const double *restrict row, const double *restrict leap, size_t count,
                       double *restrict weight, double *restrict sums) {
    memset(sums, 0, count * sizeof *sums);
    for (size_t t = 0; t < count; t += STEP) {
        for (size_t i = 0; i < count; i += STEP)
            for (size_t e = 0; e < STEP; e++) {
                /* Two chains: one would wait for its own last addition. */
                double even = sums[t + e], odd = 0;
                for (size_t u = 0; u < STEP; u += 2) {
                    even += weight[i + u] * row[(i + u) * STEP + e];
                    odd += weight[i + u + 1] * row[(i + u + 1) * STEP + e];
                }
                sums[t + e] = even + odd;
            }
        for (size_t e = 0; e < STEP; e++)
            sums[t + e] = reduce(sums[t + e]);
        for (size_t i = 0; i < count; i++)
            weight[i] = reduce(weight[i] * leap[i]);
    }
}

/* result[j] = sum over t of product[j + 1 + t] sums[t]. */
INLINE void correlate(const double *restrict product, const double *restrict sums, size_t count,
                      double *restrict result) {
    memset(result, 0, count * sizeof *result);
    for (size_t t = 0; t < count; t += STEP)
        for (size_t j = 0; j < count - t; j++) {
            double sum = result[j];
            for (size_t u = 0; u < STEP; u++)
                sum += product[j + 1 + t + u] * sums[t + u];
            result[j] = sum;
        }
}

/* Leaves in f->coefficient the polynomial of degree below k through the first k (x, y). */
INLINE void interpolate(Field *f, size_t k) {
    size_t count = whole_steps(k);
    const double *product = expand_roots(f, k);
    for (size_t j = 0; j < count; j++)
        f->coefficient[j] = j < k ? reduce((double)(j + 1) * product[j + 1]) : 0;
    list_powers(f->x, count, f->power);
    evaluate(f->coefficient, count, f->power, count, f->weight);
    invert(f->weight, f->sums, count);
    for (size_t i = 0; i < count; i++)
        f->weight[i] = i < k ? reduce(f->weight[i] * f->y[i]) : 0;
    transpose(f->power, count, f->row);
    sum_powers(f->row, f->power + STEP * count, count, f->weight, f->sums);
    correlate(product, f->sums, count, f->coefficient);
}

#endif
