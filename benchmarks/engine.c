/* Calls of the engine in a loop without Python, for the rank that has loaded this as a plugin: see
 * benchmarks/engine.py. */
#include "mlxdist.h"

#include <time.h>

static double now_us(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

/* Microseconds of `count` sums of `elements` float32, one after the other. */
int time_all_reduce(mlxdist_group *group, const float *in, float *out, int64_t elements, int count, double *us) {
  mlxdist_layout layout = {MLXDIST_FLOAT32, 1, {elements}};
  double begin = now_us();
  for (int i = 0; i < count; i++) {
    int error = mlxdist_all_reduce(group, in, out, &layout, MLXDIST_SUM, 0);
    if (error) return error;
    double end = now_us();
    us[i] = end - begin;
    begin = end;
  }
  return MLXDIST_OK;
}
