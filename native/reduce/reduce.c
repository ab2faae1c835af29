#include "reduce.h"

#include "isa.h"

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

static bool always(void) { return true; }

#if defined(__x86_64__)
/* Every processor with AVX2 has had F16C too, but a virtual machine may hide it. */
static bool has_avx2(void) { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c"); }
static bool has_avx512(void) { return has_avx2() && __builtin_cpu_supports("avx512f"); }
#endif

/* Each processor has the first ones up to one that it lacks. */
static const struct {
  const char *name;
  bool (*present)(void);
  reduce_table *kernels;
} isas[] = {
#if defined(__aarch64__)
    {"neon", always, &reduce_neon},
#else
    {"baseline", always, &reduce_baseline},
#endif
#if defined(__x86_64__)
    {"avx2", has_avx2, &reduce_avx2},
    {"avx512", has_avx512, &reduce_avx512},
#endif
};

int reduce_isas(void) {
  int count = 0;
  while (count < (int)(sizeof isas / sizeof *isas) && isas[count].present()) count++;
  return count;
}

const char *reduce_isa_name(int isa) { return isas[isa].name; }

static inline reduce_kernel_fn look_up(int isa, int32_t dtype, int32_t op) {
  if (dtype < 0 || dtype >= REDUCE_DTYPES || op < 0 || op >= REDUCE_OPS) return NULL;
  while (isa > 0 && !(*isas[isa].kernels)[dtype][op]) isa--;
  return (*isas[isa].kernels)[dtype][op];
}

reduce_kernel_fn reduce_kernel_of(int isa, int32_t dtype, int32_t op) { return look_up(isa, dtype, op); }

reduce_kernel_fn reduce_kernel(int32_t dtype, int32_t op) {
  static atomic_int isas_here; /* 0: not known yet */
  int count = atomic_load_explicit(&isas_here, memory_order_relaxed);
  if (!count) atomic_store_explicit(&isas_here, count = reduce_isas(), memory_order_relaxed);
  return look_up(count - 1, dtype, op);
}
