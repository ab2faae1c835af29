/* The engine over a provider that loses and retransmits messages, in forked processes. */
#include "world.h"

static mlxdist_layout vector(int64_t count) {
  return (mlxdist_layout){.dtype = MLXDIST_INT32, .ndim = 1, .shape = {count}};
}

static int32_t value(int rank, uint64_t i, int salt) {
  return (int32_t)(i * 7 + (uint64_t)rank * 1000003 + (uint64_t)salt);
}

static int32_t *filled(int rank, uint64_t count, int salt) {
  int32_t *array = malloc(count * sizeof *array + 1);
  REQUIRE(array);
  for (uint64_t i = 0; i < count; i++) array[i] = value(rank, i, salt);
  return array;
}

static void check_sum(const int32_t *out, uint64_t count, int size, int salt) {
  for (uint64_t i = 0; i < count; i++) {
    int64_t sum = 0;
    for (int rank = 0; rank < size; rank++) sum += value(rank, i, salt);
    REQUIRE(out[i] == (int32_t)sum);
  }
}

static void all_sum(mlxdist_group *group, int rank, int size, uint64_t count, int salt, int in_place) {
  mlxdist_layout layout = vector((int64_t)count);
  int32_t *in = filled(rank, count, salt), *out = in_place ? in : filled(9, count, 0);
  REQUIRE(mlxdist_all_reduce(group, in, out, &layout, MLXDIST_SUM, 0) == MLXDIST_OK);
  check_sum(out, count, size, salt);
  if (!in_place) free(out);
  free(in);
}

static void all_to_all(mlxdist_group *group, int rank, int size, uint64_t part, int salt) {
  uint64_t count = part * (uint64_t)size;
  mlxdist_layout layout = vector((int64_t)count);
  int32_t *in = filled(rank, count, salt), *out = filled(9, count, 0);
  REQUIRE(mlxdist_all_to_all(group, in, out, &layout, 0) == MLXDIST_OK);
  for (int from = 0; from < size; from++)
    for (uint64_t i = 0; i < part; i++)
      REQUIRE(out[(uint64_t)from * part + i] == value(from, (uint64_t)rank * part + i, salt));
  free(in);
  free(out);
}

static void one_way(mlxdist_group *group, int rank, uint64_t count, int salt) {
  mlxdist_layout layout = vector((int64_t)count);
  int32_t *data = filled(rank, count, salt);
  if (rank == 0) REQUIRE(mlxdist_send(group, data, &layout, 1, 0) == MLXDIST_OK);
  if (rank == 1) REQUIRE(mlxdist_recv(group, data, &layout, 0, 0) == MLXDIST_OK);
  for (uint64_t i = 0; i < count && rank < 2; i++) REQUIRE(data[i] == value(0, i, salt));
  free(data);
}

static const uint64_t counts[] = {0, 1, 900, 2000, 40000, 300001};

static void under(struct world *world, int rank, int size, const char *faults) {
  int barriers = 0;
  struct world_side side;
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.checksum = strstr(faults, "corrupt") != 0;
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  world_side_open(&side, world, group, rank);
  REQUIRE(mlxdist_group_inject_faults(group, faults) == MLXDIST_OK);
  for (int round = 0; round < 3; round++)
    for (size_t c = 0; c < sizeof counts / sizeof *counts; c++) {
      all_sum(group, rank, size, counts[c], round, 0);
      all_sum(group, rank, size, counts[c], round + 1, 1);
      all_to_all(group, rank, size, counts[c], round);
      one_way(group, rank, counts[c], round);
    }
  mlxdist_stats stats;
  mlxdist_group_stats(group, &stats);
  REQUIRE(stats.retransmissions > 0);
  REQUIRE((stats.damaged > 0) == options.checksum);
  REQUIRE((stats.reconnections > 0) == (strstr(faults, "error") != 0));
  REQUIRE(mlxdist_group_inject_faults(group, "none") == MLXDIST_OK);
  world_side_leave(&side, &barriers);
}

static void losses(struct world *world, int rank, int size) { under(world, rank, size, "drop=1/30,seed=5"); }

static void losses_and_repetitions(struct world *world, int rank, int size) {
  under(world, rank, size, "drop=1/50,duplicate=1/10,seed=7");
}

static void damages(struct world *world, int rank, int size) {
  under(world, rank, size, "corrupt=1/30,truncate=1/30,seed=9");
}

static void errors(struct world *world, int rank, int size) { under(world, rank, size, "error=1/60,drop=1/60,seed=3"); }

/* Rank 0's last message is lost and rank 0 computes: its progress thread sends it again. */
static void last_message(struct world *world, int rank, int size) {
  int barriers = 0;
  (void)size;
  mlxdist_group *group = world_join(world, rank, &barriers, 0);
  mlxdist_layout layout = vector(500);
  int32_t *data = filled(rank, 500, 0);
  REQUIRE(mlxdist_barrier(group, 0) == MLXDIST_OK);
  if (rank == 0) {
    REQUIRE(mlxdist_group_inject_faults(group, "drop_next=1") == MLXDIST_OK);
    REQUIRE(mlxdist_send(group, data, &layout, 1, 0) == MLXDIST_OK);
  } else {
    REQUIRE(mlxdist_recv(group, data, &layout, 0, 0) == MLXDIST_OK);
    for (uint64_t i = 0; i < 500; i++) REQUIRE(data[i] == value(0, i, 0));
  }
  world_barrier(world, &barriers); /* outside the library, until rank 1 has it */
  free(data);
  world_leave(world, group, &barriers);
}

/* Operations that were started on one group end in any order, also with no thread waiting. */
static void handles(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = world_join(world, rank, &barriers, 0), *groups[3] = {0};
  for (int i = 0; i < 3; i++)
    REQUIRE(mlxdist_group_split(group, 0, i == 1 ? -rank : rank, 0, &groups[i]) == MLXDIST_OK);
  REQUIRE(mlxdist_group_rank(groups[1]) == size - 1 - rank);
  int32_t *in[9], *out[9];
  mlxdist_call calls[9];
  for (int n = 0; n < 9; n++) {
    int i = rank % 2 ? 8 - n : n; /* groups in opposite order, but each group's own in the same */
    int which = i / 3, slot = which * 3 + (rank % 2 ? 2 - i % 3 : i % 3);
    uint64_t count = slot % 3 == 1 ? 300001 : 700;
    mlxdist_layout layout = vector((int64_t)count);
    in[slot] = filled(rank, count, slot);
    out[slot] = filled(9, count, 0);
    calls[slot] = (mlxdist_call){.timeout = -1, .starts = 1};
    REQUIRE(mlxdist_all_reduce(groups[which], in[slot], out[slot], &layout, MLXDIST_SUM, &calls[slot]) == MLXDIST_OK);
  }
  while (!mlxdist_handle_done(calls[4].handle)) sched_yield();
  for (int n = 0; n < 9; n++) {
    int slot = rank % 2 ? n : 8 - n;
    REQUIRE(mlxdist_handle_wait(calls[slot].handle, -1) == MLXDIST_OK);
    check_sum(out[slot], slot % 3 == 1 ? 300001 : 700, size, slot);
    mlxdist_handle_free(calls[slot].handle);
    free(in[slot]);
    free(out[slot]);
  }
  for (int i = 0; i < 3; i++) mlxdist_group_destroy(groups[i]);
  world_leave(world, group, &barriers);
}

/* Two groups, called one after the other, in another order on the last rank: legal for ranks with more threads, so the
 * deadline ends it here. mlxdist/runtime/diagnostics/deadlock.py finds it where ranks can ask each other. */
static void opposite_order(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.timeout = options.entry_timeout = 1;
  mlxdist_group *group = world_join(world, rank, &barriers, &options), *a, *b;
  REQUIRE(mlxdist_group_split(group, 0, rank, 0, &a) == MLXDIST_OK);
  REQUIRE(mlxdist_group_split(group, 0, rank, 0, &b) == MLXDIST_OK);
  mlxdist_layout layout = vector(10);
  int32_t *data = filled(rank, 10, 0);
  int odd = rank == size - 1;
  int status = odd ? mlxdist_all_reduce(b, data, data, &layout, MLXDIST_MAX, 0)
                   : mlxdist_all_reduce(a, data, data, &layout, MLXDIST_SUM, 0);
  REQUIRE(status == MLXDIST_TIMEOUT);
  REQUIRE(strstr(mlxdist_last_error(), "all_max") || strstr(mlxdist_last_error(), "all_sum"));
  free(data);
  world_barrier(world, &barriers);
  mlxdist_group_destroy(a);
  mlxdist_group_destroy(b);
  mlxdist_group_destroy(group);
}

int main(void) {
  int failed = 0;
  REQUIRE(mlxdist_debug_open("off", -1, 0) == MLXDIST_OK);
  failed |= world_run(2, losses);
  failed |= world_run(3, losses);
  failed |= world_run(4, losses_and_repetitions);
  failed |= world_run(2, damages);
  failed |= world_run(3, errors);
  failed |= world_run(2, last_message);
  failed |= world_run(2, handles);
  failed |= world_run(4, handles);
  failed |= world_run(2, opposite_order);
  failed |= world_run(3, opposite_order);
  if (!failed) printf("engine_faults_test passed\n");
  return failed;
}
