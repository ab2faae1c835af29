/*
 * The reductions of every instruction set that this processor has, compared bit by bit with one element at a time,
 * computed in the plainest way. Any NaN is as good as another.
 */
#include "check.h"
#include "isa.h"

#include <stdbool.h>
#include <stdint.h>

enum { MOST_SOURCES = 17, MOST_ELEMENTS = 4099, MOST_BYTES = 8, HALVES = 1 << 16 };

enum kind { SIGNED, UNSIGNED, REAL, COMPLEX };
static const struct dtype {
  const char *name;
  enum kind kind;
  size_t size;
} dtypes[REDUCE_DTYPES] = {
    [MLXDIST_BOOL] = {"bool", UNSIGNED, 1},     [MLXDIST_UINT8] = {"uint8", UNSIGNED, 1},
    [MLXDIST_UINT16] = {"uint16", UNSIGNED, 2}, [MLXDIST_UINT32] = {"uint32", UNSIGNED, 4},
    [MLXDIST_UINT64] = {"uint64", UNSIGNED, 8}, [MLXDIST_INT8] = {"int8", SIGNED, 1},
    [MLXDIST_INT16] = {"int16", SIGNED, 2},     [MLXDIST_INT32] = {"int32", SIGNED, 4},
    [MLXDIST_INT64] = {"int64", SIGNED, 8},     [MLXDIST_FLOAT16] = {"float16", REAL, 2},
    [MLXDIST_FLOAT32] = {"float32", REAL, 4},   [MLXDIST_FLOAT64] = {"float64", REAL, 8},
    [MLXDIST_BFLOAT16] = {"bfloat16", REAL, 2}, [MLXDIST_COMPLEX64] = {"complex64", COMPLEX, 8},
};
static const char *const ops[REDUCE_OPS] = {
    [MLXDIST_SUM] = "sum", [MLXDIST_MAX] = "max", [MLXDIST_MIN] = "min", [MLXDIST_PROD] = "prod"};
static const int32_t halves[] = {MLXDIST_FLOAT16, MLXDIST_BFLOAT16};

/* --- One element. */

struct half {
  int mantissa_bits, least_exponent; /* of normal numbers */
};

static struct half half_format(int32_t dtype) {
  return dtype == MLXDIST_FLOAT16 ? (struct half){10, -14} : (struct half){7, -126};
}

static double power_of_2(int exponent) {
  uint64_t bits = (uint64_t)(exponent + 1023) << 52;
  double value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static int exponent_of(double magnitude) {
  uint64_t bits;
  memcpy(&bits, &magnitude, sizeof bits);
  return (int)(bits >> 52) - 1023;
}

static double double_of_half(uint16_t bits, struct half format) {
  int mantissa = bits & ((1 << format.mantissa_bits) - 1), exponent = (bits & 0x7fff) >> format.mantissa_bits;
  double sign = bits & 0x8000 ? -1 : 1, unit = power_of_2(format.least_exponent - format.mantissa_bits);
  if (exponent == 0x7fff >> format.mantissa_bits) return sign * (mantissa ? __builtin_nan("") : __builtin_inf());
  if (exponent == 0) return sign * mantissa * unit;
  return sign * (mantissa + (1 << format.mantissa_bits)) * unit * power_of_2(exponent - 1);
}

/* Rounds to nearest, ties to even. */
static uint16_t half_of_double(double value, struct half format) {
  uint16_t sign = __builtin_signbit(value) ? 0x8000 : 0;
  uint16_t infinity = 0x7fff >> format.mantissa_bits << format.mantissa_bits;
  double magnitude = sign ? -value : value;
  if (value != value) return infinity | 1;
  int exponent = exponent_of(magnitude);
  if (exponent > 1 - format.least_exponent) return sign | infinity;
  if (exponent < format.least_exponent) exponent = format.least_exponent;
  double mantissa = magnitude / power_of_2(exponent - format.mantissa_bits);
  mantissa = mantissa + 0x1p52 - 0x1p52; /* from 2^52 on doubles have no fraction */
  /* The leading bit of a normal number adds one to the exponent, and rounding up to the next power of 2 another. */
  return sign | (uint16_t)(((exponent - format.least_exponent) << format.mantissa_bits) + (int)mantissa);
}

/* In double, sums and products of two float32 are so precise that rounding them to float32 rounds the exact result. */
struct value {
  uint64_t integer; /* sign-extended */
  double real, imaginary;
};

static struct value load(int32_t dtype, const void *from) {
  struct value value = {0};
  size_t size = dtypes[dtype].size;
  float parts[2];
  if (dtypes[dtype].kind == COMPLEX) {
    memcpy(parts, from, sizeof parts);
    value.real = parts[0], value.imaginary = parts[1];
  } else if (dtype == MLXDIST_FLOAT64) {
    memcpy(&value.real, from, size);
  } else if (dtype == MLXDIST_FLOAT32) {
    memcpy(parts, from, size);
    value.real = parts[0];
  } else {
    memcpy(&value.integer, from, size);
    int unused = 64 - 8 * (int)size;
    if (dtypes[dtype].kind == REAL) value.real = double_of_half((uint16_t)value.integer, half_format(dtype));
    if (dtypes[dtype].kind == SIGNED) value.integer = (uint64_t)((int64_t)(value.integer << unused) >> unused);
  }
  return value;
}

static void store(int32_t dtype, void *to, struct value value) {
  float parts[2] = {(float)value.real, (float)value.imaginary};
  bool half = dtypes[dtype].kind == REAL && dtypes[dtype].size == 2;
  uint16_t bits = half ? half_of_double(value.real, half_format(dtype)) : 0;
  bool single = dtype == MLXDIST_FLOAT32 || dtype == MLXDIST_COMPLEX64;
  const void *from = half                       ? (const void *)&bits
                     : single                   ? (const void *)parts
                     : dtype == MLXDIST_FLOAT64 ? (const void *)&value.real
                                                : (const void *)&value.integer;
  memcpy(to, from, dtypes[dtype].size);
}

static bool at_least(enum kind kind, struct value a, struct value b) {
  if (kind == UNSIGNED) return a.integer >= b.integer;
  if (kind == SIGNED) return (int64_t)a.integer >= (int64_t)b.integer;
  if (kind == REAL) return a.real >= b.real;
  return a.real > b.real || (a.real == b.real && a.imaginary >= b.imaginary);
}

static bool has_nan(struct value a) { return a.real != a.real || a.imaginary != a.imaginary; }

/* As it is accumulated: in float32, but for float64. GCC 12 drops the conversion there and back where it vectorizes. */
static double rounded(int32_t dtype, double value) {
  volatile float single = (float)value;
  return dtype == MLXDIST_FLOAT64 ? value : single;
}

static struct value combine(int32_t dtype, int32_t op, struct value a, struct value b) {
  enum kind kind = dtypes[dtype].kind;
  if (op == MLXDIST_MAX) return has_nan(a) || (!has_nan(b) && at_least(kind, a, b)) ? a : b;
  if (op == MLXDIST_MIN) return has_nan(a) || (!has_nan(b) && at_least(kind, b, a)) ? a : b;
  bool sum = op == MLXDIST_SUM;
  if (dtype == MLXDIST_BOOL) return (struct value){.integer = sum ? a.integer | b.integer : a.integer & b.integer};
  if (kind < REAL) return (struct value){.integer = sum ? a.integer + b.integer : a.integer * b.integer};
  if (sum) {
    return (struct value){.real = rounded(dtype, a.real + b.real),
                          .imaginary = rounded(dtype, a.imaginary + b.imaginary)};
  }
  if (kind == REAL) return (struct value){.real = rounded(dtype, a.real * b.real)};
  double real = rounded(dtype, a.real * b.real) - rounded(dtype, a.imaginary * b.imaginary);
  double imaginary = rounded(dtype, a.real * b.imaginary) + rounded(dtype, a.imaginary * b.real);
  return (struct value){.real = rounded(dtype, real), .imaginary = rounded(dtype, imaginary)};
}

static void reduce_plainly(int32_t dtype, int32_t op, void *out, const void *const *sources, int n, uint64_t count) {
  size_t size = dtypes[dtype].size;
  for (uint64_t i = 0; i < count; i++) {
    struct value value = load(dtype, (const char *)sources[0] + i * size);
    for (int s = 1; s < n; s++) {
      value = combine(dtype, op, value, load(dtype, (const char *)sources[s] + i * size));
    }
    store(dtype, (char *)out + i * size, value);
  }
}

/* Equal bits, or NaN where NaN is expected. */
static bool equal(int32_t dtype, const void *a, const void *b) {
  if (memcmp(a, b, dtypes[dtype].size) == 0) return true;
  if (dtype == MLXDIST_COMPLEX64) {
    const char *x = a, *y = b;
    return equal(MLXDIST_FLOAT32, x, y) && equal(MLXDIST_FLOAT32, x + 4, y + 4);
  }
  return has_nan(load(dtype, a)) && has_nan(load(dtype, b));
}

static void check_equal(int isa, int32_t dtype, int32_t op, int n, const void *out, const void *expected,
                        uint64_t count, const char *where) {
  size_t size = dtypes[dtype].size;
  if (memcmp(out, expected, count * size) == 0) return;
  for (uint64_t i = 0; i < count; i++) {
    const unsigned char *a = (const unsigned char *)out + i * size, *b = (const unsigned char *)expected + i * size;
    uint64_t got = 0, wanted = 0;
    memcpy(&got, a, size);
    memcpy(&wanted, b, size);
    CHECK(equal(dtype, a, b), "%s: %s of %d %s, element %llu of %llu is %#llx, expected %#llx (%s)",
          reduce_isa_name(isa), ops[op], n, dtypes[dtype].name, (unsigned long long)i, (unsigned long long)count,
          (unsigned long long)got, (unsigned long long)wanted, where);
  }
}

/* --- What is reduced. */

static uint64_t random_bits(void) {
  static uint64_t state = 0x9e3779b97f4a7c15u;
  state ^= state << 13;
  state ^= state >> 7;
  return state ^= state << 17;
}

/* Any bits; for floats also numbers so close to one another that sums of them are rounded and products do not all
 * overflow. */
static void fill(int32_t dtype, void *to, uint64_t count) {
  size_t size = dtypes[dtype].size;
  for (uint64_t i = 0; i < count; i++) {
    uint64_t bits = random_bits();
    double near_one = (double)(int64_t)(bits >> 32) * 0x1p-31 - 1 + (double)(bits & 2);
    struct value value = {.real = near_one, .imaginary = -near_one / 3};
    if (dtype == MLXDIST_BOOL) bits &= 1;
    memcpy((char *)to + i * size, &bits, size);
    if (dtypes[dtype].kind >= REAL && bits >> 32 & 3) store(dtype, (char *)to + i * size, value);
  }
}

/* `count` elements after `skipped` unused ones, which misalign them. Nothing follows: the address sanitizer sees every
 * access past the end. */
static char *copy(const void *elements, uint64_t count, size_t size, uint64_t skipped) {
  size_t bytes = (count + skipped) * size;
  char *memory = malloc(bytes ? bytes : 1);
  CHECK(memory, "no memory");
  memset(memory, 0x5a, skipped * size);
  return memcpy(memory + skipped * size, elements, count * size);
}

static void *allocate(size_t bytes) {
  void *memory = calloc(1, bytes);
  CHECK(memory, "no memory");
  return memory;
}

/* --- Tests. */

/* `in_place`: the source that is also the output, or -1. */
static void check_kernel(int isa, int32_t dtype, int32_t op, int n, uint64_t count, uint64_t skipped, int in_place,
                         const void *const *data, const void *expected) {
  size_t size = dtypes[dtype].size;
  char *copies[MOST_SOURCES];
  const void *sources[MOST_SOURCES];
  for (int s = 0; s < n; s++) sources[s] = copies[s] = copy(data[s], count, size, skipped);
  char *out = in_place < 0 ? copy(data[0], count, size, skipped) : copies[in_place];
  if (in_place < 0) memset(out, 0x5a, count * size);
  reduce_kernel_of(isa, dtype, op)(out, sources, n, count);
  char where[64];
  snprintf(where, sizeof where, "%llu skipped, in place of source %d", (unsigned long long)skipped, in_place);
  check_equal(isa, dtype, op, n, out, expected, count, where);
  for (const char *c = out - skipped * size; c < out; c++) CHECK_EQUAL(*c, 0x5a);
  for (int s = 0; s < n; s++) {
    CHECK(s == in_place || memcmp(copies[s], data[s], count * size) == 0, "%s changed a source", reduce_isa_name(isa));
    free(copies[s] - skipped * size);
  }
  if (in_place < 0) free(out - skipped * size);
}

static void check_lengths(int32_t dtype, int32_t op, int n, const void *const *data, const void *expected) {
  static const uint64_t counts[] = {0, 1, 7, 8, 15, 16, 17, 31, 33, 1000, 1023, 1025, MOST_ELEMENTS};
  for (int isa = 0; isa < reduce_isas(); isa++) {
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
      for (uint64_t skipped = 0; skipped < 2; skipped++) {
        for (int in_place = -1; in_place < n; in_place++) {
          check_kernel(isa, dtype, op, n, counts[c], skipped, in_place, data, expected);
        }
      }
    }
  }
}

static void check_dtypes(enum kind least, enum kind most) {
  static const int numbers[] = {1, 2, 3, 4, 5, 8, MOST_SOURCES};
  void *data[MOST_SOURCES], *expected = allocate(MOST_ELEMENTS * MOST_BYTES);
  for (int s = 0; s < MOST_SOURCES; s++) data[s] = allocate(MOST_ELEMENTS * MOST_BYTES);
  for (int32_t dtype = 0; dtype < REDUCE_DTYPES; dtype++) {
    if (dtypes[dtype].kind < least || dtypes[dtype].kind > most) continue;
    for (int s = 0; s < MOST_SOURCES; s++) fill(dtype, data[s], MOST_ELEMENTS);
    for (int32_t op = 0; op < REDUCE_OPS; op++) {
      for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++) {
        const void *const *sources = (const void *const *)data;
        reduce_plainly(dtype, op, expected, sources, numbers[i], MOST_ELEMENTS);
        check_lengths(dtype, op, numbers[i], sources, expected);
      }
    }
  }
  for (int s = 0; s < MOST_SOURCES; s++) free(data[s]);
  free(expected);
}

static void test_integers(void) { check_dtypes(SIGNED, UNSIGNED); }
static void test_floats(void) { check_dtypes(REAL, COMPLEX); }

static void check_halves(int32_t dtype, int32_t op, int n, const void *const *sources) {
  static uint16_t expected[HALVES], out[HALVES];
  reduce_plainly(dtype, op, expected, sources, n, HALVES);
  for (int isa = 0; isa < reduce_isas(); isa++) {
    reduce_kernel_of(isa, dtype, op)(out, sources, n, HALVES);
    check_equal(isa, dtype, op, n, out, expected, HALVES, "every half");
  }
}

/* Every 16-bit float alone, and with one that is special, from either side. */
static void test_every_half(void) {
  static uint16_t all[HALVES], other[HALVES];
  for (int i = 0; i < HALVES; i++) all[i] = (uint16_t)i;
  for (size_t h = 0; h < sizeof halves / sizeof *halves; h++) {
    struct half format = half_format(halves[h]);
    uint16_t infinity = 0x7fff >> format.mantissa_bits << format.mantissa_bits, normal = 1 << format.mantissa_bits;
    uint16_t one = half_of_double(1, format);
    const uint16_t special[] = {0,
                                1,
                                normal - 1,
                                normal,
                                normal + 1,
                                one - 1,
                                one,
                                one + 1,
                                infinity - 1,
                                infinity,
                                infinity + 1,
                                0x7fff,
                                infinity - normal,
                                one + 10 * normal,
                                one / 2};
    for (int32_t op = 0; op < REDUCE_OPS; op++) {
      check_halves(halves[h], op, 1, (const void *[]){all});
      for (size_t i = 0; i < 2 * sizeof special / sizeof *special; i++) {
        for (int j = 0; j < HALVES; j++) other[j] = special[i / 2] | (i % 2 ? 0x8000 : 0);
        check_halves(halves[h], op, 2, (const void *[]){all, other});
        check_halves(halves[h], op, 2, (const void *[]){other, all});
      }
    }
  }
}

/* Results known without any arithmetic of this file. */
static void test_known_results(void) {
  static const struct {
    int32_t dtype, op;
    int n;
    uint64_t sources[3], expected;
  } known[] = {
      {MLXDIST_FLOAT16, MLXDIST_SUM, 2, {0x7bff, 0x4c00}, 0x7c00},          /* 65504 + 16: a tie, to infinity */
      {MLXDIST_FLOAT16, MLXDIST_SUM, 2, {0x7bff, 0x4bff}, 0x7bff},          /* 65504 + 15.99 */
      {MLXDIST_FLOAT16, MLXDIST_SUM, 2, {0xfbff, 0xfbff}, 0xfc00},          /* -65504 - 65504 */
      {MLXDIST_FLOAT16, MLXDIST_SUM, 2, {0x6800, 0x3c00}, 0x6800},          /* 2048 + 1: a tie, down to even */
      {MLXDIST_FLOAT16, MLXDIST_SUM, 2, {0x6801, 0x3c00}, 0x6802},          /* 2050 + 1: a tie, up to even */
      {MLXDIST_FLOAT16, MLXDIST_SUM, 3, {0x6800, 0x3c00, 0x3c00}, 0x6801},  /* 2048 + 1 + 1, rounded once */
      {MLXDIST_FLOAT16, MLXDIST_SUM, 3, {0x7bff, 0x7bff, 0xfbff}, 0x7bff},  /* overflows only on the way */
      {MLXDIST_FLOAT16, MLXDIST_SUM, 2, {0x03ff, 0x0001}, 0x0400},          /* the subnormals' way to normal */
      {MLXDIST_FLOAT16, MLXDIST_PROD, 2, {0x0001, 0x3800}, 0x0000},         /* 2^-25: a tie, to zero */
      {MLXDIST_FLOAT16, MLXDIST_PROD, 2, {0x0003, 0x3800}, 0x0002},         /* 3 * 2^-25: a tie, up to even */
      {MLXDIST_FLOAT16, MLXDIST_MAX, 2, {0x8000, 0x0000}, 0x8000},          /* equal: the first */
      {MLXDIST_FLOAT16, MLXDIST_MIN, 2, {0x0000, 0x8000}, 0x0000},          /* equal: the first */
      {MLXDIST_FLOAT16, MLXDIST_MAX, 3, {0x7c00, 0xfe00, 0x7c00}, 0x7e00},  /* a NaN wins */
      {MLXDIST_BFLOAT16, MLXDIST_SUM, 2, {0x4380, 0x3f80}, 0x4380},         /* 256 + 1: a tie, down to even */
      {MLXDIST_BFLOAT16, MLXDIST_SUM, 2, {0x4381, 0x3f80}, 0x4382},         /* 258 + 1: a tie, up to even */
      {MLXDIST_BFLOAT16, MLXDIST_SUM, 3, {0x4380, 0x3f80, 0x3f80}, 0x4381}, /* 256 + 1 + 1, rounded once */
      {MLXDIST_BFLOAT16, MLXDIST_SUM, 2, {0x7f7f, 0x7f7f}, 0x7f80},         /* overflow of float32 */
      {MLXDIST_BFLOAT16, MLXDIST_SUM, 2, {0x7f7f, 0x7b00}, 0x7f80},         /* half a unit above the largest: a tie */
      {MLXDIST_BFLOAT16, MLXDIST_SUM, 2, {0x007f, 0x0001}, 0x0080},         /* the subnormals' way to normal */
      {MLXDIST_BFLOAT16, MLXDIST_SUM, 2, {0x7f80, 0xff80}, 0x7fc0},         /* infinity - infinity */
      {MLXDIST_BFLOAT16, MLXDIST_MAX, 2, {0x7f81, 0x0000}, 0x7fc0},         /* the smallest NaN is no infinity */
      {MLXDIST_BFLOAT16, MLXDIST_MIN, 2, {0x7fff, 0x0000}, 0x7fc0},         /* the largest NaN is no zero */
      {MLXDIST_FLOAT32, MLXDIST_SUM, 2, {0x7f7fffff, 0x73000000}, 0x7f800000}, /* a tie, to infinity */
      {MLXDIST_FLOAT32, MLXDIST_SUM, 2, {0x4b800000, 0x3f800000}, 0x4b800000}, /* 2^24 + 1: a tie, down to even */
      {MLXDIST_INT8, MLXDIST_SUM, 2, {0x7f, 0x01}, 0x80},                      /* 127 + 1 = -128 */
      {MLXDIST_INT16, MLXDIST_PROD, 2, {0xffff, 0x8000}, 0x8000},              /* -1 * -32768 */
      {MLXDIST_UINT16, MLXDIST_PROD, 2, {0xffff, 0xffff}, 0x0001},             /* as int it would overflow */
      {MLXDIST_INT64, MLXDIST_MAX, 2, {UINT64_MAX, 1}, 1},                     /* -1 and 1 */
      {MLXDIST_UINT64, MLXDIST_MAX, 2, {UINT64_MAX, 1}, UINT64_MAX},
      {MLXDIST_BOOL, MLXDIST_SUM, 2, {1, 1}, 1},
      /* One product is 1 + 2^-11 + 2^-24, rounded to the other before they are subtracted: 0. Fused, 2^-24 is left. */
      {MLXDIST_COMPLEX64, MLXDIST_PROD, 2, {0x3f8010003f800800, 0x3f8000003f800800}, 0x4000100000000000},
      {MLXDIST_COMPLEX64, MLXDIST_PROD, 2, {0x3f8008003f801000, 0x3f8008003f800000}, 0x4000100000000000},
  };
  enum { COUNT = 33 };
  for (size_t k = 0; k < sizeof known / sizeof *known; k++) {
    uint64_t arrays[4][COUNT] = {0}, expected[COUNT] = {0};
    size_t size = dtypes[known[k].dtype].size;
    for (size_t i = 0; i < COUNT; i++) {
      for (int s = 0; s < known[k].n; s++) memcpy((char *)arrays[s] + i * size, &known[k].sources[s], size);
      memcpy((char *)expected + i * size, &known[k].expected, size);
    }
    const void *sources[] = {arrays[0], arrays[1], arrays[2]};
    for (int isa = 0; isa < reduce_isas(); isa++) {
      reduce_kernel_of(isa, known[k].dtype, known[k].op)(arrays[3], sources, known[k].n, COUNT);
      check_equal(isa, known[k].dtype, known[k].op, known[k].n, arrays[3], expected, COUNT, "known results");
    }
  }
}

static void test_choice(void) {
  int best = reduce_isas() - 1;
  CHECK(best >= 0, "no instruction set");
  for (int32_t dtype = -1; dtype <= REDUCE_DTYPES; dtype++) {
    for (int32_t op = -1; op <= REDUCE_OPS; op++) {
      bool known = dtype >= 0 && dtype < REDUCE_DTYPES && op >= 0 && op < REDUCE_OPS;
      CHECK(reduce_kernel(dtype, op) == reduce_kernel_of(best, dtype, op), "dtype %d, op %d", dtype, op);
      for (int isa = 0; isa <= best; isa++) CHECK_EQUAL(reduce_kernel_of(isa, dtype, op) != NULL, known);
    }
  }
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Choice", test_choice},        {"KnownResults", test_known_results},
      {"EveryHalf", test_every_half}, {"Integers", test_integers},
      {"Floats", test_floats},
  };
  printf("instruction sets:");
  for (int isa = 0; isa < reduce_isas(); isa++) printf(" %s", reduce_isa_name(isa));
  printf("\n");
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
