/*
 * Messages from one C program to another over two RDMA devices: what perftest's ib_send_lat and ib_send_bw measure, for
 * the engine's send and recv.
 *
 *     verbs latency|bandwidth BYTES COUNT PROVIDER DEVICE0 GID_INDEX0 DEVICE1 GID_INDEX1
 *
 * latency: half of a ping-pong, the median of COUNT in microseconds. bandwidth: COUNT messages one way, in MiB/s, from
 * the moment when the receiver asks for them until it has the last one. Prints one line of JSON.
 * Build and run: benchmarks/verbs.py.
 */
#include "world.h"

#include <time.h>

static int is_latency, count;
static size_t bytes;
static mlxdist_link own[2]; /* of either rank: the device that it reaches the other one by */

static double now_us(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec * 1e6 + (double)time.tv_nsec / 1e3;
}

static int compare(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void send_to(mlxdist_group *group, const void *data, const mlxdist_layout *layout, int to) {
  REQUIRE(mlxdist_send(group, data, layout, to, 0) == MLXDIST_OK);
}

static void receive_from(mlxdist_group *group, void *data, const mlxdist_layout *layout, int from) {
  REQUIRE(mlxdist_recv(group, data, layout, from, 0) == MLXDIST_OK);
}

/* Rank 0's median of half a round trip. */
static double latency(mlxdist_group *group, int rank, void *data, const mlxdist_layout *layout) {
  double *samples = malloc((size_t)count * sizeof *samples);
  REQUIRE(samples);
  int warm_up = count / 10;
  for (int i = -warm_up; i < count; i++) {
    double begin = now_us();
    if (rank == 0) send_to(group, data, layout, 1);
    receive_from(group, data, layout, 1 - rank);
    if (rank == 1) send_to(group, data, layout, 0);
    if (i >= 0) samples[i] = (now_us() - begin) / 2;
  }
  qsort(samples, (size_t)count, sizeof *samples, compare);
  double median = samples[count / 2];
  free(samples);
  return median;
}

/* What rank 0 gets from rank 1. */
static double bandwidth(mlxdist_group *group, int rank, void *data, const mlxdist_layout *layout) {
  mlxdist_layout one = {MLXDIST_UINT8, 1, {1}};
  uint8_t go = 0;
  if (rank == 1) {
    receive_from(group, &go, &one, 0);
    for (int i = 0; i < count; i++) send_to(group, data, layout, 0);
    return 0;
  }
  double begin = now_us();
  send_to(group, &go, &one, 1);
  for (int i = 0; i < count; i++) receive_from(group, data, layout, 1);
  return (double)bytes * count / (now_us() - begin) * 1e6 / (1 << 20);
}

/* To the processor that receives the packets to this rank's device, as perftest is (verbs.py). */
static void pin(int rank) {
  cpu_set_t processors;
  CPU_ZERO(&processors);
  CPU_SET(rank, &processors);
  REQUIRE(sched_setaffinity(0, sizeof processors, &processors) == 0);
}

static void run(struct world *world, int rank, int size) {
  int barriers = 0;
  pin(rank);
  mlxdist_link links[2][MLXDIST_MAX_LINKS] = {0};
  links[1 - rank][0] = own[rank];
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.links = &links[0][0];
  (void)size;
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  mlxdist_layout layout = {MLXDIST_UINT8, 1, {(int64_t)bytes}};
  uint8_t *data = calloc(bytes, 1);
  REQUIRE(data);
  mlxdist_stats stats;
  double result = (is_latency ? latency : bandwidth)(group, rank, data, &layout);
  REQUIRE(mlxdist_barrier(group, 0) == MLXDIST_OK);
  mlxdist_group_stats(group, &stats);
  if (rank == 0) {
    printf("{\"result\": %.4f, \"retransmissions\": %llu}\n", result, (unsigned long long)stats.retransmissions);
    fflush(stdout);
  }
  world_leave(world, group, &barriers);
  free(data);
}

int main(int argc, char **argv) {
  if (argc != 9) {
    fprintf(stderr, "usage: verbs latency|bandwidth BYTES COUNT PROVIDER DEVICE0 GID_INDEX0 DEVICE1 GID_INDEX1\n");
    return 2;
  }
  is_latency = !strcmp(argv[1], "latency");
  bytes = (size_t)strtoull(argv[2], 0, 10);
  count = atoi(argv[3]);
  for (int rank = 0; rank < 2; rank++)
    own[rank] = (mlxdist_link){argv[4], argv[5 + 2 * rank], atoi(argv[6 + 2 * rank])};
  return world_run(2, run);
}
