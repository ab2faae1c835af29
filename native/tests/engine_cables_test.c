/* Two cables between every two ranks: large messages use both, and one that dies is dropped. */
#include "engine.h"
#include "group.h"
#include "world.h"

static mlxdist_layout vector(int64_t count) {
  return (mlxdist_layout){.dtype = MLXDIST_INT32, .ndim = 1, .shape = {count}};
}

static int32_t value(int rank, uint64_t i) { return (int32_t)(i * 7 + (uint64_t)rank * 1000003); }

static void all_sum(mlxdist_group *group, int rank, int size, uint64_t count) {
  mlxdist_layout layout = vector((int64_t)count);
  int32_t *in = calloc(count, sizeof *in), *out = calloc(count, sizeof *out);
  REQUIRE(in && out);
  for (uint64_t i = 0; i < count; i++) in[i] = value(rank, i);
  REQUIRE(mlxdist_all_reduce(group, in, out, &layout, MLXDIST_SUM, 0) == MLXDIST_OK);
  for (uint64_t i = 0; i < count; i++) {
    int64_t sum = 0;
    for (int other = 0; other < size; other++) sum += value(other, i);
    REQUIRE(out[i] == (int32_t)sum);
  }
  free(in);
  free(out);
}

static uint64_t bytes_by(mlxdist_group *group, int cable) {
  struct verbs_counters counters = {0};
  struct engine *engine = group->engine;
  engine_lock(engine);
  engine->verbs->read_counters(engine->devices[cable].context, &counters);
  engine_unlock(engine);
  return counters.bytes_sent;
}

static mlxdist_group *join(struct world *world, int rank, int *barriers) {
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.cables = 2;
  return world_join(world, rank, barriers, &options);
}

static void both_are_used(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = join(world, rank, &barriers);
  for (int i = 0; i < 5; i++) all_sum(group, rank, size, 1000003);
  all_sum(group, rank, size, 10);
  uint64_t first = bytes_by(group, 0), second = bytes_by(group, 1);
  REQUIRE(second > (first + second) / 4 && first > (first + second) / 4);
  world_leave(world, group, &barriers);
}

/* Nothing of what this rank sends by one cable arrives any more: the other one takes over, without an error. */
static void one_dies(struct world *world, int rank, int size, int cable, int everywhere) {
  int barriers = 0;
  char faults[] = "0:drop=1/1";
  faults[0] = (char)('0' + cable);
  mlxdist_group *group = join(world, rank, &barriers);
  all_sum(group, rank, size, 1000003);
  if (everywhere || rank == 0) REQUIRE(mlxdist_group_inject(group, faults) == MLXDIST_OK);
  for (int i = 0; i < 3; i++) all_sum(group, rank, size, 1000003);
  uint64_t before = bytes_by(group, cable);
  for (int i = 0; i < 3; i++) all_sum(group, rank, size, 1000003);
  for (int i = 0; i < 100; i++) all_sum(group, rank, size, 10);
  if (everywhere || rank == 0) REQUIRE(bytes_by(group, cable) == before);
  world_leave(world, group, &barriers);
}

static void first_dies(struct world *world, int rank, int size) { one_dies(world, rank, size, 0, 1); }
static void second_dies(struct world *world, int rank, int size) { one_dies(world, rank, size, 1, 1); }
static void first_dies_one_way(struct world *world, int rank, int size) { one_dies(world, rank, size, 0, 0); }

int main(void) {
  int failed = 0;
  failed |= world_run(2, both_are_used);
  failed |= world_run(3, both_are_used);
  failed |= world_run(2, first_dies);
  failed |= world_run(2, second_dies);
  failed |= world_run(2, first_dies_one_way);
  failed |= world_run(3, first_dies);
  if (!failed) printf("engine_cables_test passed\n");
  return failed;
}
