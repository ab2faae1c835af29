/* Queue pairs that fail are re-created, on one side or on both, and operations go on as if nothing had happened. */
#include "group.h"
#include "reconnect.h"
#include "simulation.h"

#include <errno.h>

/* What a driver does when a work request fails: what is posted is flushed, with errors. Not again before the new one
 * has carried something: one that always fails is an error. */
static void break_queue_pair(const struct simulated_rank *rank, int32_t peer, uint64_t channel) {
  struct channel *broken = &rank->group->engine->peers[peer].endpoint.channels[channel];
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
  if (broken->open && broken->reconnects == 0)
    REQUIRE(broken->device->verbs->modify_qp(broken->qp, &attr, IBV_QP_STATE) == 0);
}

static void test_broken(int32_t size, bool by_all) {
  static const uint64_t counts[] = {1, 900, 40000, 300001};
  struct simulation simulation;
  simulation_open(&simulation, size, 0, true, 1);
  for (int i = 0; i < 60; i++) {
    for (int32_t rank = 0; rank < (by_all ? size : 1) && i % 3 == 0; rank++)
      break_queue_pair(&simulation.ranks[rank], (rank + 1) % size, (uint64_t)(i / 3 % 2));
    REQUIRE(simulation_sum(&simulation, counts[i % 4]) == MLXDIST_OK);
  }
  for (int32_t rank = 0; rank < (by_all ? size : 1); rank++)
    REQUIRE(simulation_stats(&simulation, rank).reconnections > 0);
  simulation_close(&simulation);
}

/* They break while messages are on their way, at any moment. */
static void test_broken_meanwhile(int32_t size) {
  struct simulation simulation;
  simulation_open(&simulation, size, 0, true, 1);
  for (int i = 0; i < 30; i++) {
    struct simulated_operation operations[WORLD_MAX_RANKS];
    struct simulated_step step = {.kind = SIMULATED_SUM, .count = i % 2 ? 10 : 300001};
    for (int32_t rank = 0; rank < size; rank++) simulated_start(&operations[rank], simulation.ranks[rank].group, step);
    for (int32_t ended = 0; ended < size; ended += simulated_has_ended(&operations[ended])) {
      if (simulation_draw(&simulation, 100) == 0) {
        int32_t rank = (int32_t)simulation_draw(&simulation, (uint64_t)size);
        int32_t distance = 1 + (int32_t)simulation_draw(&simulation, (uint64_t)size - 1);
        break_queue_pair(&simulation.ranks[rank], (rank + distance) % size, simulation_draw(&simulation, 2));
      }
      simulation_turn(&simulation);
    }
    for (int32_t rank = 0; rank < size; rank++) REQUIRE(simulated_end(&operations[rank]) == MLXDIST_OK);
  }
  simulation_close(&simulation);
}

/* One rank gives a link up, whose queue pairs fail for good there. Its peers have nothing on the way that could tell
 * them: what they acknowledge and send by it is lost. */
static void test_given_up(int32_t size, enum simulated_kind kind) {
  struct simulation simulation;
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.links_per_peer = 2;
  options.bulk_slots = 2;
  options.timeout = options.entry_timeout = 60;
  simulation_open(&simulation, size, &options, true, 1);
  REQUIRE(simulation_sum(&simulation, 10) == MLXDIST_OK);
  simulation_inject(&simulation, size - 1, "0:error=1/1");
  for (int i = 0; i < 20; i++) {
    struct simulated_step step = {.kind = kind, .count = i % 2 ? 10 : 100000, .root = i % size};
    REQUIRE(simulation_run_operation(&simulation, step, 100 * SECOND) == MLXDIST_OK);
  }
  for (int32_t rank = 0; rank < size - 1; rank++)
    REQUIRE(simulation.ranks[rank].group->engine->peers[size - 1].endpoint.dead_links == 1);
  simulation_close(&simulation);
}

/* Where nothing but the queue pair joins the ranks, it fails as it did. */
static void test_without_side_channel(void) {
  struct simulation simulation;
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.timeout = options.entry_timeout = 1;
  simulation_open(&simulation, 2, &options, false, 1);
  for (int32_t rank = 0; rank < 2; rank++) break_queue_pair(&simulation.ranks[rank], !rank, 0);
  REQUIRE(simulation_sum(&simulation, 10) == MLXDIST_TRANSPORT);
  REQUIRE(strstr(mlxdist_last_error(), "completed with WR_FLUSH_ERR: the queue pair was in the error state"));
  simulation_close(&simulation);
}

/* A device that makes no queue pair more, or does not let go of one. */
static struct verbs refusing[2];

static struct ibv_qp *refuse_create(struct ibv_pd *pd, struct ibv_qp_init_attr *init) {
  (void)pd;
  (void)init;
  errno = EBUSY;
  return 0;
}

static int (*destroy_qp)(struct ibv_qp *qp);

/* It does so all the same: what a device keeps would count as memory of this process that leaks. */
static int refuse_destroy(struct ibv_qp *qp) {
  destroy_qp(qp);
  return EBUSY;
}

static void refuse(const struct simulated_rank *rank, const char *verb) {
  struct device *device = &rank->group->engine->transport.devices[0];
  struct verbs *table = &refusing[rank->rank];
  *table = *device->verbs;
  destroy_qp = device->verbs->destroy_qp;
  if (strcmp(verb, "create_qp") == 0)
    table->create_qp = refuse_create;
  else
    table->destroy_qp = refuse_destroy;
  device->verbs = table;
}

/* Neither rank crashes on the queue pair that is missing. Where the eager one is left its peer hears of it at once. */
static void test_refused(const char *verb, int channel, bool by_both) {
  struct simulation simulation;
  char failed[64];
  snprintf(failed, sizeof failed, "%s on the %s queue pair", verb, channel % 2 ? "bulk" : "eager");
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.timeout = options.entry_timeout = channel % 2 ? 30 : 1;
  simulation_open(&simulation, 2, &options, true, 1);
  REQUIRE(simulation_sum(&simulation, 10) == MLXDIST_OK);
  for (int32_t rank = 0; rank < (by_both ? 2 : 1); rank++) {
    refuse(&simulation.ranks[rank], verb);
    break_queue_pair(&simulation.ranks[rank], !rank, (uint64_t)channel);
  }
  int statuses[2] = {MLXDIST_OK, MLXDIST_OK};
  while (!statuses[0] || !statuses[1]) {
    struct simulated_operation operations[2];
    for (int rank = 0; rank < 2; rank++)
      simulated_start(&operations[rank], simulation.ranks[rank].group,
                      (struct simulated_step){.kind = SIMULATED_SUM, .count = 10});
    while (!simulated_has_ended(&operations[0]) || !simulated_has_ended(&operations[1])) simulation_turn(&simulation);
    for (int rank = 0; rank < 2; rank++) statuses[rank] = simulated_end(&operations[rank]);
  }
  simulation_run(&simulation, SECOND); /* nothing that comes later changes it */
  for (int rank = 0; rank < 2; rank++) {
    bool hears = rank == 0 || by_both || channel % 2;
    REQUIRE(statuses[rank] == (hears ? MLXDIST_TRANSPORT : MLXDIST_TIMEOUT));
    REQUIRE(mlxdist_group_error(simulation.ranks[rank].group) == statuses[rank]);
    if (hears) REQUIRE(strstr(mlxdist_last_error(), failed));
  }
  simulation_close(&simulation);
}

/* The peer has begun to reconnect too, and its message comes to a rank that could not. */
static void test_peer_asks(void) {
  struct simulation simulation;
  simulation_open(&simulation, 2, 0, true, 1);
  REQUIRE(simulation_sum(&simulation, 10) == MLXDIST_OK);
  for (int32_t rank = 0; rank < 2; rank++) {
    refuse(&simulation.ranks[rank], "create_qp");
    struct endpoint *endpoint = &simulation.ranks[rank].group->engine->peers[!rank].endpoint;
    struct reconnect_message message = {.step = 1, .channel = 1, .epoch = 1}, reply;
    REQUIRE(reconnect_begin(&endpoint->channels[1], IBV_WC_WR_FLUSH_ERR) == MLXDIST_TRANSPORT);
    REQUIRE(!reconnect_next(endpoint, &message));
    REQUIRE(!reconnect_receive(endpoint, &message, &reply));
  }
  simulation_close(&simulation);
}

int main(void) {
  REQUIRE(mlxdist_debug_open("off", -1, 0) == MLXDIST_OK);
  for (int32_t size = 2; size <= 3; size++) {
    test_broken(size, false);
    test_broken(size, true);
    test_broken_meanwhile(size);
  }
  for (int32_t size = 2; size <= 3; size++)
    for (int kind = 0; kind < SIMULATED_KINDS; kind++) test_given_up(size, (enum simulated_kind)kind);
  test_without_side_channel();
  test_refused("create_qp", 0, false);
  test_refused("create_qp", 1, false);
  test_refused("create_qp", 0, true);
  test_refused("destroy_qp", 0, false);
  test_refused("destroy_qp", 1, false);
  test_peer_asks();
  printf("engine_reconnect_test passed\n");
  return 0;
}
