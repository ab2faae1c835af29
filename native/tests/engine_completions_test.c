/* The engine on a device whose completions do not always come, of sends and of receives. */
#include "group.h"
#include "simulation.h"

static mlxdist_options default_options(void) {
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.soft_profile = "apple-odd";
  return options;
}

static struct channel *channel_of(const struct simulation *simulation, int32_t rank, enum wire_channel kind) {
  return &simulation->ranks[rank].group->engine->peers[!rank].endpoint.channels[kind];
}

static int run(struct simulation *simulation, enum simulated_kind kind, uint64_t count) {
  return simulation_run_operation(simulation, (struct simulated_step){.kind = kind, .count = count}, 100 * SECOND);
}

/* A message whose receive has no completion is retransmitted, and a queue pair without receives is replaced. */
static void test_lost_completions(void) {
  struct simulation simulation;
  mlxdist_options options = default_options();
  simulation_open(&simulation, 2, &options, true, 1);
  simulation_inject(&simulation, 0, "seed=1,lose=1/100");
  simulation_inject(&simulation, 1, "seed=2,lose=1/100");
  for (int i = 0; i < 400; i++) REQUIRE(simulation_sum(&simulation, i % 100 ? 8 : 40000) == MLXDIST_OK);
  for (int rank = 0; rank < 2; rank++) {
    struct verbs_counters counters;
    const struct device *device = &simulation.ranks[rank].group->engine->transport.devices[0];
    device->verbs->read_counters(device->context, &counters);
    REQUIRE(counters.completions_lost_by_fault > 0);
  }
  simulation_close(&simulation);
}

/* The last repetition has no completion, though the peer has confirmed all: until the queue pair is replaced nothing
 * can leave, since its slot might still be read. */
static void test_lost_completion_of_a_repetition(void) {
  struct simulation simulation;
  mlxdist_options options = default_options();
  simulation_open(&simulation, 2, &options, true, 1);
  REQUIRE(simulation_sum(&simulation, 40000) == MLXDIST_OK);
  simulation_run(&simulation, SECOND / 5); /* what is confirmed late */
  struct channel *bulk = channel_of(&simulation, 0, WIRE_BULK);
  bulk->completed = (bulk->last_retransmit = bulk->requests) - 1;
  REQUIRE(simulation_sum(&simulation, 40000) == MLXDIST_OK);
  for (int rank = 0; rank < 2; rank++) REQUIRE(channel_of(&simulation, rank, WIRE_BULK)->epoch > 0);
  simulation_close(&simulation);
}

/* Lets the channel wait for the completions of its last acknowledgements. */
static void lose_acknowledgements(struct channel *channel) {
  channel->completed = channel->requests - 1;
  for (int buffer = 0; buffer < (int)CHANNEL_CONTROL_BUFFERS; buffer++)
    channel->control_requests[buffer] = channel->requests;
}

/* A rank that only receives sends nothing but acknowledgements: without them its peer does not learn that there is room
 * again. */
static void test_lost_completions_of_acknowledgements(void) {
  struct simulation simulation;
  mlxdist_options options = default_options();
  options.timeout = options.entry_timeout = 20;
  simulation_open(&simulation, 2, &options, true, 1);
  REQUIRE(run(&simulation, SIMULATED_BARRIER, 0) == MLXDIST_OK);
  simulation_run(&simulation, SECOND / 5);
  lose_acknowledgements(channel_of(&simulation, 1, WIRE_EAGER));
  REQUIRE(run(&simulation, SIMULATED_BROADCAST, 400000) == MLXDIST_OK);
  for (int rank = 0; rank < 2; rank++) REQUIRE(channel_of(&simulation, rank, WIRE_EAGER)->epoch > 0);
  simulation_close(&simulation);
}

/* The number of a work request wraps: the last repetition, and the last use of a buffer, may be older than that. */
static void test_many_work_requests(void) {
  struct simulation simulation;
  mlxdist_options options = default_options();
  options.timeout = options.entry_timeout = 5;
  simulation_open(&simulation, 2, &options, false, 1);
  REQUIRE(simulation_sum(&simulation, 40000) == MLXDIST_OK);
  simulation_run(&simulation, SECOND / 5);
  for (int rank = 0; rank < 2; rank++)
    for (enum wire_channel kind = WIRE_EAGER; kind <= WIRE_BULK; kind++) {
      struct channel *channel = channel_of(&simulation, rank, kind);
      channel->completed = channel->requests += 1u << 31;
    }
  REQUIRE(simulation_sum(&simulation, 40000) == MLXDIST_OK);
  simulation_close(&simulation);
}

/* No way to agree on another queue pair: an error, in time, and on every rank. */
static void test_completions_lost_for_good(void) {
  struct simulation simulation;
  mlxdist_options options = default_options();
  options.timeout = options.entry_timeout = 1;
  simulation_open(&simulation, 2, &options, false, 1);
  simulation_inject(&simulation, -1, "lose=1/1");
  REQUIRE(simulation_sum(&simulation, 8) == MLXDIST_TIMEOUT);
  simulation_close(&simulation);
}

int main(void) {
  REQUIRE(mlxdist_debug_open("off", -1, 0) == MLXDIST_OK);
  test_lost_completions();
  test_lost_completion_of_a_repetition();
  test_lost_completions_of_acknowledgements();
  test_many_work_requests();
  test_completions_lost_for_good();
  printf("engine_completions_test passed\n");
  return 0;
}
