/*
 * all_reduce between two C programs, without Python or MLX, beside a copy of the same bytes by both at once.
 *
 * Prints one line of JSON per size: microseconds, of the slower process, in blocks that alternate.
 * Arguments: rounds. Build and run: benchmarks/engine.py.
 */
#include "world.h"

#include <time.h>

#define BLOCK_US 5000.0
#define MAX_CALLS 5000
#define MAX_ROUNDS 1000
#define WARM_UP 2

static int rounds = 15;

static double now_us(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static void pin(int rank) {
#ifdef __linux__
  cpu_set_t allowed, own;
  REQUIRE(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  int wanted = rank % CPU_COUNT(&allowed);
  for (int core = 0; core < CPU_SETSIZE; core++) {
    if (!CPU_ISSET(core, &allowed) || wanted-- > 0) continue;
    CPU_ZERO(&own);
    CPU_SET(core, &own);
    REQUIRE(sched_setaffinity(0, sizeof own, &own) == 0);
    return;
  }
#else
  (void)rank; /* macOS has no way to say it */
#endif
}

/* The larger of both processes' values. */
static double slower(mlxdist_group *group, double value) {
  mlxdist_layout one = {MLXDIST_FLOAT64, 1, {1}};
  REQUIRE(mlxdist_all_reduce(group, &value, &value, &one, MLXDIST_MAX, 0) == MLXDIST_OK);
  return value;
}

struct measurement {
  mlxdist_group *group;
  const float *in;
  float *out;
  mlxdist_layout layout;
};

enum work { ALL_REDUCE, MEMCPY, WORKS };

static double block(struct measurement *m, enum work work, int calls) {
  REQUIRE(mlxdist_barrier(m->group, 0) == MLXDIST_OK);
  double begin = now_us();
  for (int i = 0; i < calls; i++) {
    if (work == ALL_REDUCE) {
      REQUIRE(mlxdist_all_reduce(m->group, m->in, m->out, &m->layout, MLXDIST_SUM, 0) == MLXDIST_OK);
    } else {
      memcpy(m->out, m->in, (size_t)m->layout.shape[0] * sizeof *m->in);
      __asm__ volatile("" : : "r"(m->out) : "memory"); /* else the compiler copies once for all calls */
    }
  }
  return slower(m->group, (now_us() - begin) / calls);
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void print_spread(const char *name, double *samples) {
  qsort(samples, (size_t)rounds, sizeof *samples, compare);
  double middle = rounds % 2 ? samples[rounds / 2] : (samples[rounds / 2 - 1] + samples[rounds / 2]) / 2;
  printf(", \"%s\": {\"median\": %.4f, \"min\": %.4f, \"max\": %.4f}", name, middle, samples[0], samples[rounds - 1]);
}

static void measure(mlxdist_group *group, int rank, size_t bytes) {
  size_t elements = bytes / sizeof(float), wrong = 0;
  float *in = aligned_alloc(4096, bytes), *out = aligned_alloc(4096, bytes);
  REQUIRE(in && out);
  for (size_t i = 0; i < elements; i++) {
    in[i] = (float)(i % 1021 * (size_t)(rank + 1));
    out[i] = -1;
  }
  struct measurement m = {group, in, out, {MLXDIST_FLOAT32, 1, {(int64_t)elements}}};
  double samples[WORKS][MAX_ROUNDS];
  int calls[WORKS];
  for (int work = 0; work < WORKS; work++) {
    block(&m, work, 1);
    double once = block(&m, work, 2);
    calls[work] = once * MAX_CALLS < BLOCK_US ? MAX_CALLS : (int)(BLOCK_US / once) + 1;
  }
  for (int round = -WARM_UP; round < rounds; round++) {
    for (int turn = 0; turn < WORKS; turn++) {
      int work = (turn + round + WARM_UP) % WORKS;
      double took = block(&m, work, calls[work]);
      if (round >= 0) samples[work][round] = took;
    }
  }
  block(&m, ALL_REDUCE, 1);
  for (size_t i = 0; i < elements; i++) wrong += out[i] != (float)(i % 1021 * 3);
  wrong = (size_t)slower(group, (double)wrong);
  if (rank == 0) {
    printf("{\"bytes\": %zu, \"wrong\": %zu", bytes, wrong);
    print_spread("all_reduce", samples[ALL_REDUCE]);
    print_spread("memcpy", samples[MEMCPY]);
    printf("}\n");
    fflush(stdout);
  }
  free(in);
  free(out);
}

static void run(struct world *world, int rank, int size) {
  static const size_t sizes[] = {4 << 10, 1 << 20, 16 << 20};
  int barriers = 0;
  (void)size;
  pin(rank);
  mlxdist_group *group = world_join(world, rank, &barriers, 0);
  for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) measure(group, rank, sizes[i]);
  world_leave(world, group, &barriers);
}

int main(int argc, char **argv) {
  if (argc > 1) rounds = atoi(argv[1]);
  if (rounds < 1 || rounds > MAX_ROUNDS) {
    fprintf(stderr, "engine: rounds must be from 1 to %d\n", MAX_ROUNDS);
    return 2;
  }
  return world_run(2, run);
}
