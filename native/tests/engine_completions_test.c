/* The engine on a device whose completions do not always come, of sends and of receives. */
#include "engine.h"
#include "group.h"
#include "progress.h"
#include "sums.h"

static mlxdist_options default_options(void) {
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.soft_profile = "apple-odd";
  return options;
}

static struct channel *channel_to(mlxdist_group *group, int rank, enum wire_channel kind) {
  return &group->engine->peers[rank].endpoint.channels[kind];
}

/* A message whose receive has no completion is retransmitted, and a queue pair without receives is replaced. */
static void lost_completions(struct world *world, int rank, int size) {
  int barriers = 0;
  struct world_side side;
  mlxdist_options options = default_options();
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  world_side_open(&side, world, group, rank);
  REQUIRE(mlxdist_group_inject_faults(group, rank ? "seed=2,lose=1/100" : "seed=1,lose=1/100") == MLXDIST_OK);
  for (int i = 0; i < 400; i++) REQUIRE(all_sum(group, rank, size, i % 100 ? 8 : 40000) == MLXDIST_OK);
  struct verbs_counters counters;
  const struct device *device = &group->engine->transport.devices[0];
  device->verbs->read_counters(device->context, &counters);
  REQUIRE(counters.completions_lost_by_fault > 0);
  REQUIRE(mlxdist_group_inject_faults(group, "none") == MLXDIST_OK);
  world_side_leave(&side, &barriers);
}

/* The last repetition has no completion, though the peer has confirmed all: until the queue pair is replaced nothing
 * can leave, since its slot might still be read. */
static void lost_completion_of_a_repetition(struct world *world, int rank, int size) {
  int barriers = 0;
  struct world_side side;
  mlxdist_options options = default_options();
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  world_side_open(&side, world, group, rank);
  REQUIRE(all_sum(group, rank, size, 40000) == MLXDIST_OK);
  REQUIRE(mlxdist_barrier(group, 0) == MLXDIST_OK);
  struct channel *bulk = channel_to(group, !rank, WIRE_BULK);
  engine_lock(group->engine);
  if (rank == 0) bulk->completed = (bulk->last_retransmit = bulk->requests) - 1;
  engine_unlock(group->engine);
  REQUIRE(all_sum(group, rank, size, 40000) == MLXDIST_OK);
  REQUIRE(bulk->epoch > 0);
  world_side_leave(&side, &barriers);
}

/* Lets the channel wait for the completions of its last acknowledgements. */
static void lose_acknowledgements(struct channel *channel) {
  struct engine *engine = peer_of(channel->endpoint)->engine;
  bool progressed = false;
  engine_lock(engine);
  engine_progress(engine, &progressed); /* what has completed before counts no more */
  channel->completed = channel->requests - 1;
  for (int buffer = 0; buffer < (int)CHANNEL_CONTROL_BUFFERS; buffer++)
    channel->control_requests[buffer] = channel->requests;
  engine_unlock(engine);
}

/* A rank that only receives sends nothing but acknowledgements: without them its peer does not learn that there is room
 * again. */
static void lost_completions_of_acknowledgements(struct world *world, int rank, int size) {
  (void)size;
  int barriers = 0;
  struct world_side side;
  mlxdist_options options = default_options();
  options.timeout = options.entry_timeout = 20;
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  world_side_open(&side, world, group, rank);
  REQUIRE(mlxdist_barrier(group, 0) == MLXDIST_OK);
  if (rank == 1) {
    usleep(500000); /* what rank 0 can send before this rank has entered is here, and acknowledged */
    lose_acknowledgements(channel_to(group, 0, WIRE_EAGER));
  }
  const mlxdist_layout layout = {.dtype = MLXDIST_INT32, .ndim = 1, .shape = {400000}};
  int32_t *values = calloc(400000, sizeof *values);
  for (int i = 0; i < 400000; i++) values[i] = rank == 0 ? i : 0;
  REQUIRE(mlxdist_broadcast(group, values, &layout, 0, 0) == MLXDIST_OK);
  REQUIRE(values[399999] == 399999);
  REQUIRE(channel_to(group, !rank, WIRE_EAGER)->epoch > 0);
  free(values);
  world_side_leave(&side, &barriers);
}

/* The number of a work request wraps: the last repetition, and the last use of a buffer, may be older than that. */
static void many_work_requests(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_options options = default_options();
  options.timeout = options.entry_timeout = 5;
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  REQUIRE(all_sum(group, rank, size, 40000) == MLXDIST_OK);
  usleep(100000);
  world_barrier(world, &barriers);
  for (enum wire_channel kind = WIRE_EAGER; kind <= WIRE_BULK; kind++) {
    struct channel *channel = channel_to(group, !rank, kind);
    bool progressed = false;
    engine_lock(group->engine);
    engine_progress(group->engine, &progressed);
    channel->completed = channel->requests += 1u << 31;
    engine_unlock(group->engine);
  }
  REQUIRE(all_sum(group, rank, size, 40000) == MLXDIST_OK);
  world_leave(world, group, &barriers);
}

/* No way to agree on another queue pair: an error, in time, and on every rank. */
static void completions_lost_for_good(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_options options = default_options();
  options.timeout = options.entry_timeout = 1;
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  REQUIRE(mlxdist_group_inject_faults(group, "lose=1/1") == MLXDIST_OK);
  world_barrier(world, &barriers); /* what arrived before the fault would be enough for this rank */
  REQUIRE(all_sum(group, rank, size, 8) == MLXDIST_TIMEOUT);
  world_barrier(world, &barriers);
  mlxdist_group_destroy(group);
}

int main(void) {
  REQUIRE(mlxdist_debug_open("off", -1, 0) == MLXDIST_OK);
  int failed = world_run(2, lost_completions);
  failed |= world_run(2, lost_completion_of_a_repetition);
  failed |= world_run(2, lost_completions_of_acknowledgements);
  failed |= world_run(2, many_work_requests);
  failed |= world_run(2, completions_lost_for_good);
  if (!failed) printf("engine_completions_test passed\n");
  return failed;
}
