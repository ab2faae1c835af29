/*
 * all_reduce between two C programs, without Python or MLX, beside the machine's own limits: the same bytes from one
 * core to another, and a copy of them by both programs at once.
 *
 * Prints one line of JSON per size: microseconds, of the slower process, in blocks that alternate.
 * Arguments: rounds. Build and run: benchmarks/engine.py.
 */
#include "world.h"

#include <stdbool.h>
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

static int32_t cores[2] = {-1, -1};
static bool two_cores;

#ifdef __linux__
/* Finds the cores of both ranks, then keeps this one on its own. */
static void pin(int rank) {
  cpu_set_t allowed, own;
  REQUIRE(sched_getaffinity(0, sizeof allowed, &allowed) == 0);
  two_cores = CPU_COUNT(&allowed) > 1;
  for (int core = 0, found = 0; core < CPU_SETSIZE && found < 2; core++)
    if (CPU_ISSET(core, &allowed)) cores[found++] = core;
  CPU_ZERO(&own);
  CPU_SET(cores[two_cores ? rank : 0], &own);
  REQUIRE(sched_setaffinity(0, sizeof own, &own) == 0);
}
#else
static void pin(int rank) {
  (void)rank; /* macOS has no way to say it */
  two_cores = sysconf(_SC_NPROCESSORS_ONLN) > 1;
}
#endif

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
  mlxdist_core_transfer transfer;
};

enum work { ALL_REDUCE, MEMCPY, TRANSFER, WORKS };

static char *bytes_of(size_t bytes, int factor) {
  char *made = aligned_alloc(4096, bytes);
  REQUIRE(made);
  for (size_t i = 0; i < bytes; i++) made[i] = (char)(i % 251 * (size_t)factor);
  return made;
}

static mlxdist_core_transfer transfer_of(size_t bytes) {
  return (mlxdist_core_transfer){.bytes = bytes,
                            .cores = {cores[0], cores[1]},
                            .shared = bytes_of(bytes, 0),
                            .sent = {bytes_of(bytes, 1), bytes_of(bytes, 2)},
                            .received = {bytes_of(bytes, 0), bytes_of(bytes, 0)}};
}

static size_t transfer_end(mlxdist_core_transfer *transfer) {
  size_t wrong = 0;
  for (int side = 0; side < 2; side++) {
    const char *wanted = transfer->sent[1 - side], *received = transfer->received[side];
    for (size_t i = 0; i < transfer->bytes; i++) wrong += received[i] != wanted[i];
  }
  free(transfer->shared);
  for (int side = 0; side < 2; side++) {
    free((void *)transfer->sent[side]);
    free(transfer->received[side]);
  }
  return wrong;
}

/* Mean microseconds of a call; by rank 0 alone, while the other waits for it. */
static double transfers(struct measurement *m, int calls) {
  static double nanoseconds[MAX_CALLS + 1];
  double sum = 0;
  m->transfer.count = (uint64_t)calls;
  REQUIRE(mlxdist_time_core_transfers(&m->transfer, nanoseconds) == MLXDIST_OK);
  for (int i = 0; i < calls; i++) sum += nanoseconds[i];
  return sum / calls / 1e3;
}

static double block(struct measurement *m, enum work work, int calls) {
  REQUIRE(mlxdist_barrier(m->group, 0) == MLXDIST_OK);
  if (work == TRANSFER) return slower(m->group, m->transfer.bytes ? transfers(m, calls) : 0);
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
  struct measurement m = {group, in, out, {MLXDIST_FLOAT32, 1, {(int64_t)elements}}, {.bytes = 0}};
  if (rank == 0 && two_cores) m.transfer = transfer_of(bytes);
  double samples[WORKS][MAX_ROUNDS];
  int calls[WORKS];
  int works = two_cores ? WORKS : TRANSFER;
  for (int work = 0; work < works; work++) {
    block(&m, work, 1);
    double once = block(&m, work, 2);
    calls[work] = once * MAX_CALLS < BLOCK_US ? MAX_CALLS : (int)(BLOCK_US / once) + 1;
  }
  for (int round = -WARM_UP; round < rounds; round++) {
    for (int turn = 0; turn < works; turn++) {
      int work = (turn + round + WARM_UP) % works;
      double took = block(&m, work, calls[work]);
      if (round >= 0) samples[work][round] = took;
    }
  }
  block(&m, ALL_REDUCE, 1);
  for (size_t i = 0; i < elements; i++) wrong += out[i] != (float)(i % 1021 * 3);
  if (m.transfer.bytes) wrong += transfer_end(&m.transfer);
  wrong = (size_t)slower(group, (double)wrong);
  if (rank == 0) {
    printf("{\"bytes\": %zu, \"wrong\": %zu", bytes, wrong);
    print_spread("all_reduce", samples[ALL_REDUCE]);
    print_spread("memcpy", samples[MEMCPY]);
    if (two_cores) print_spread("transfer", samples[TRANSFER]);
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
