/* Several cables between every two ranks: large messages use all, and one that dies is dropped until it works again. */
#include "group.h"
#include "simulation.h"

#define LARGE 300001
#define STRIPED 1000003 /* pieces enough for all cables */
#define COPIED 40000    /* an operation ends before what left of it has left the send queue */

static uint64_t bytes_by(const struct simulation *simulation, int32_t rank, uint32_t cable) {
  struct verbs_counters counters = {0};
  const struct device *device = &simulation->ranks[rank].group->engine->transport.devices[cable];
  device->verbs->read_counters(device->context, &counters);
  return counters.bytes_sent;
}

static const struct endpoint *endpoint_of(const struct simulation *simulation, int32_t rank, int32_t peer) {
  return &simulation->ranks[rank].group->engine->peers[peer].endpoint;
}

/* Messages with data that have left by a cable for the first time. */
static uint32_t messages_by(const struct simulation *simulation, int32_t rank, uint32_t cable) {
  uint32_t sent = 0;
  for (int32_t peer = 0; peer < simulation->size; peer++) {
    if (peer == rank) continue;
    const struct channel *channels = &endpoint_of(simulation, rank, peer)->channels[2 * (size_t)cable];
    sent += channels[WIRE_EAGER].sent + channels[WIRE_BULK].sent;
  }
  return sent;
}

static void sums(struct simulation *simulation, int large, int small) {
  for (int i = 0; i < large; i++) REQUIRE(simulation_sum(simulation, LARGE) == MLXDIST_OK);
  for (int i = 0; i < small; i++) REQUIRE(simulation_sum(simulation, 10) == MLXDIST_OK);
}

/* Opens ranks that have exchanged something. */
static void open_ranks(struct simulation *simulation, int32_t size, uint32_t cables, double timeout, uint64_t seed) {
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.links_per_peer = cables;
  options.timeout = options.entry_timeout = timeout;
  simulation_open(simulation, size, &options, false, seed);
  sums(simulation, 1, 1);
}

/* "2:drop=1/1"; of all ranks with -1. */
static void inject(const struct simulation *simulation, int32_t rank, uint32_t cable, const char *fault) {
  char faults[64];
  snprintf(faults, sizeof faults, "%u:%s", cable, fault);
  simulation_inject(simulation, rank, faults);
}

static bool have_dead(const struct simulation *simulation, uint32_t dead) {
  for (int32_t rank = 0; rank < simulation->size; rank++)
    for (int32_t peer = 0; peer < simulation->size; peer++)
      if (peer != rank && endpoint_of(simulation, rank, peer)->dead_links != dead) return false;
  return true;
}

/* Until all ranks have found the same links dead. */
static void sum_until(struct simulation *simulation, uint64_t count, uint32_t dead) {
  for (uint64_t end = simulation->now_ns + 60 * SECOND; !have_dead(simulation, dead);) {
    REQUIRE(simulation->now_ns < end);
    REQUIRE(simulation_sum(simulation, count) == MLXDIST_OK);
    simulation_run(simulation, 10 * MILLISECOND);
  }
}

/* Each carries at least half of an even share. */
static void test_all_are_used(int32_t size, uint32_t cables) {
  struct simulation simulation;
  open_ranks(&simulation, size, cables, 30, 1);
  for (int i = 0; i < 5; i++) REQUIRE(simulation_sum(&simulation, STRIPED) == MLXDIST_OK);
  for (int32_t rank = 0; rank < size; rank++) {
    uint64_t all = 0;
    for (uint32_t cable = 0; cable < cables; cable++) all += bytes_by(&simulation, rank, cable);
    for (uint32_t cable = 0; cable < cables; cable++)
      REQUIRE(bytes_by(&simulation, rank, cable) > all / (2ull * cables));
  }
  simulation_close(&simulation);
}

/* Nothing of what `rank`, or all, send by one cable arrives any more: the others take over, without an error. */
static void test_one_dies(uint32_t cables, uint32_t cable, int32_t rank) {
  struct simulation simulation;
  open_ranks(&simulation, 2, cables, 30, 1);
  inject(&simulation, rank, cable, "drop=1/1");
  sums(&simulation, 3, 0);
  uint32_t before = messages_by(&simulation, 0, cable);
  sums(&simulation, 3, 100);
  REQUIRE(messages_by(&simulation, 0, cable) == before);
  simulation_close(&simulation);
}

/* The cables in an order of chance. */
static void shuffle(struct simulation *simulation, uint32_t order[], uint32_t cables) {
  for (uint32_t i = 0; i < cables; i++) {
    uint32_t j = (uint32_t)simulation_draw(simulation, i + 1);
    order[i] = order[j];
    order[j] = i;
  }
}

/* All but one die, in an order and at moments of chance: some while messages of another one are on their way to a
 * third, on one rank or on all. */
static void test_die_one_after_the_other(int32_t size, uint32_t cables, uint64_t seed) {
  struct simulation simulation;
  struct simulated_operation operations[WORLD_MAX_RANKS];
  uint32_t order[MLXDIST_MAX_LINKS];
  open_ranks(&simulation, size, cables, 30, seed);
  shuffle(&simulation, order, cables);
  for (uint32_t i = 0; i + 1 < cables; i++) {
    for (int32_t rank = 0; rank < size; rank++)
      simulated_start(&operations[rank], simulation.ranks[rank].group,
                      (struct simulated_step){.kind = SIMULATED_SUM, .count = LARGE});
    simulation_run(&simulation, simulation_draw(&simulation, (i % 2 ? 900 : 5) * MILLISECOND));
    inject(&simulation, (int32_t)simulation_draw(&simulation, (uint64_t)size + 1) - 1, order[i], "drop=1/1");
    simulation_run(&simulation, 10 * SECOND);
    for (int32_t rank = 0; rank < size; rank++) REQUIRE(simulated_end(&operations[rank]) == MLXDIST_OK);
    sums(&simulation, (int)simulation_draw(&simulation, 3), (int)simulation_draw(&simulation, 50));
  }
  sums(&simulation, 5, 100);
  simulation_close(&simulation);
}

/* All but the last at one moment: a probe by the next one is lost, too. */
static void test_die_together(uint32_t cables) {
  struct simulation simulation;
  open_ranks(&simulation, 2, cables, 30, 1);
  for (uint32_t cable = 0; cable + 1 < cables; cable++) inject(&simulation, -1, cable, "drop=1/1");
  sum_until(&simulation, LARGE, (1u << (cables - 1)) - 1);
  simulation_close(&simulation);
}

static void test_all_die(uint32_t cables) {
  struct simulation simulation;
  open_ranks(&simulation, 2, cables, 2, 1);
  for (uint32_t cable = 0; cable < cables; cable++) inject(&simulation, -1, cable, "drop=1/1");
  REQUIRE(simulation_sum(&simulation, LARGE) == MLXDIST_TIMEOUT);
  REQUIRE(strstr(mlxdist_last_error(), "for rank 0"));
  simulation_close(&simulation);
}

/* Each dies and comes back, one after the other. In the end the others die: it carries all. */
static void test_come_back(int32_t size, uint32_t cables) {
  struct simulation simulation;
  open_ranks(&simulation, size, cables, 30, 1);
  for (uint32_t cable = 0; cable < cables; cable++) {
    inject(&simulation, -1, cable, "link=down");
    sum_until(&simulation, LARGE, 1u << cable);
    inject(&simulation, -1, cable, "link=up");
    sum_until(&simulation, LARGE, 0);
    uint32_t before = messages_by(&simulation, 0, cable);
    sums(&simulation, 2, 0);
    REQUIRE(messages_by(&simulation, 0, cable) != before);
  }
  for (uint32_t cable = 0; cable + 1 < cables; cable++) inject(&simulation, -1, cable, "drop=1/1");
  sum_until(&simulation, LARGE, (1u << (cables - 1)) - 1);
  simulation_close(&simulation);
}

/* It is so slow that it counts as dead. What left by it arrives after all, behind what left by others instead. */
static void test_one_is_late(uint32_t cables, uint32_t cable) {
  struct simulation simulation;
  open_ranks(&simulation, 2, cables, 30, 1);
  inject(&simulation, -1, cable, "delay=2000000");
  sum_until(&simulation, COPIED, 1u << cable);
  inject(&simulation, -1, cable, "delay=0");
  sum_until(&simulation, COPIED, 0);
  sums(&simulation, 3, 50);
  simulation_close(&simulation);
}

/* All that rank 1 has to send are acknowledgements, by the link that loses them. Nothing but the sender's probes shows
 * it: they leave by all links from then on. */
static void test_acknowledgements_are_lost(uint32_t cables) {
  struct simulation simulation;
  open_ranks(&simulation, 2, cables, 30, 1);
  inject(&simulation, 1, 0, "drop=1/1");
  for (int i = 0; i < 10; i++) {
    struct simulated_step step = {.kind = SIMULATED_BROADCAST, .count = LARGE, .salt = (uint64_t)i};
    REQUIRE(simulation_run_operation(&simulation, step, 60 * SECOND) == MLXDIST_OK);
  }
  REQUIRE(endpoint_of(&simulation, 1, 0)->acks_by_all);
  simulation_close(&simulation);
}

/* Its queue pairs fail, and there is no side channel to re-create them by. */
static void test_one_fails(uint32_t cables, uint32_t cable) {
  struct simulation simulation;
  open_ranks(&simulation, 2, cables, 30, 1);
  inject(&simulation, -1, cable, "error=1/1");
  sum_until(&simulation, LARGE, 1u << cable);
  simulation_close(&simulation);
}

static void test_all(uint32_t cables) {
  for (int32_t size = 2; size <= 3; size++) test_all_are_used(size, cables);
  for (int32_t rank = -1; rank < 1; rank++) {
    test_one_dies(cables, 0, rank);
    test_one_dies(cables, cables - 1, rank);
  }
  for (uint64_t seed = 1; seed <= 4; seed++) test_die_one_after_the_other(2 + (int32_t)(seed % 2), cables, seed);
  test_die_together(cables);
  test_all_die(cables);
  test_acknowledgements_are_lost(cables);
  for (int32_t size = 2; size <= 3; size++) test_come_back(size, cables);
  for (uint32_t cable = 0; cable < cables; cable++) {
    test_one_is_late(cables, cable);
    test_one_fails(cables, cable);
  }
}

int main(void) {
  REQUIRE(mlxdist_debug_open("off", -1, 0) == MLXDIST_OK);
  for (uint32_t cables = 2; cables <= MLXDIST_MAX_LINKS; cables++) test_all(cables);
  printf("engine_failover_test passed\n");
  return 0;
}
