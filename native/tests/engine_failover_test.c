/* Two cables between every two ranks: large messages use both, and one that dies is dropped. */
#include "engine.h"
#include "group.h"
#include "sums.h"

static uint64_t bytes_by(mlxdist_group *group, int cable) {
  struct verbs_counters counters = {0};
  struct engine *engine = group->engine;
  engine_lock(engine);
  engine->transport.devices[cable].verbs->read_counters(engine->transport.devices[cable].context, &counters);
  engine_unlock(engine);
  return counters.bytes_sent;
}

static mlxdist_group *join(struct world *world, int rank, int *barriers) {
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.links_per_peer = 2;
  return world_join(world, rank, barriers, &options);
}

static void both_are_used(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = join(world, rank, &barriers);
  for (int i = 0; i < 5; i++) REQUIRE(all_sum(group, rank, size, 1000003) == MLXDIST_OK);
  REQUIRE(all_sum(group, rank, size, 10) == MLXDIST_OK);
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
  REQUIRE(all_sum(group, rank, size, 1000003) == MLXDIST_OK);
  if (everywhere || rank == 0) REQUIRE(mlxdist_group_inject_faults(group, faults) == MLXDIST_OK);
  for (int i = 0; i < 3; i++) REQUIRE(all_sum(group, rank, size, 1000003) == MLXDIST_OK);
  uint64_t before = bytes_by(group, cable);
  for (int i = 0; i < 3; i++) REQUIRE(all_sum(group, rank, size, 1000003) == MLXDIST_OK);
  for (int i = 0; i < 100; i++) REQUIRE(all_sum(group, rank, size, 10) == MLXDIST_OK);
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
  if (!failed) printf("engine_failover_test passed\n");
  return failed;
}
