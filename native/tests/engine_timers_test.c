/* What an engine does as time passes: it retransmits, waits for a link that comes back, and gives up at its deadlines.
 */
#include "group.h"
#include "simulation.h"

static mlxdist_options default_options(void) {
  mlxdist_options options;
  mlxdist_default_options(&options);
  return options;
}

/* Both ranks' cables are pulled for a while, and put back, in the middle of it all. */
static void test_link_flaps(void) {
  struct simulation simulation;
  struct simulated_operation operations[2];
  mlxdist_options options = default_options();
  simulation_open(&simulation, 2, &options, true, 1);
  for (int i = 0; i < 3; i++) {
    simulation_inject(&simulation, -1, "link=down");
    for (int rank = 0; rank < 2; rank++)
      simulated_start(&operations[rank], simulation.ranks[rank].group,
                      (struct simulated_step){.kind = SIMULATED_SUM, .count = 300001});
    simulation_run(&simulation, SECOND / 5);
    for (int rank = 0; rank < 2; rank++) REQUIRE(!simulated_has_ended(&operations[rank]));
    simulation_inject(&simulation, -1, "link=up");
    simulation_run(&simulation, 2 * SECOND);
    for (int rank = 0; rank < 2; rank++) REQUIRE(simulated_end(&operations[rank]) == MLXDIST_OK);
  }
  simulation_close(&simulation);
}

/* A message leaves so late that it is retransmitted, and is acknowledged while its repetition still waits to leave:
 * what the repetition is read from, must not hold another message by then, shorter or longer. */
static void test_late_repetitions(void) {
  struct simulation simulation;
  mlxdist_options options = default_options();
  options.bulk_slots = 2;
  simulation_open(&simulation, 2, &options, true, 1);
  simulation_inject(&simulation, 0, "delay=60000");
  for (int i = 0; i < 10; i++) REQUIRE(simulation_sum(&simulation, i % 2 ? 5000 : 60000) == MLXDIST_OK);
  REQUIRE(simulation_stats(&simulation, 0).retransmissions > 0);
  simulation_close(&simulation);
}

/* Runs until `seconds` have passed since `begun`. */
static void run_until(struct simulation *simulation, uint64_t begun, double seconds) {
  uint64_t end = begun + (uint64_t)(seconds * 1e9);
  if (end > simulation->now_ns) simulation_run(simulation, end - simulation->now_ns);
}

/* The last rank does not come to an operation, or comes to it and stands still then: the others wait for as long as
 * they are allowed to, not less, and their error says for whom. */
static void test_deadline(int32_t size, bool enters) {
  struct simulation simulation;
  struct simulated_operation operations[WORLD_MAX_RANKS];
  char late[32];
  snprintf(late, sizeof late, "rank %d", size - 1);
  mlxdist_options options = default_options();
  options.entry_timeout = 300;
  options.timeout = 60;
  simulation_open(&simulation, size, &options, true, 1);
  REQUIRE(simulation_sum(&simulation, 10) == MLXDIST_OK);
  uint64_t begun = simulation.now_ns;
  for (int32_t rank = 0; rank < size - !enters; rank++)
    simulated_start(&operations[rank], simulation.ranks[rank].group,
                    (struct simulated_step){.kind = SIMULATED_SUM, .count = 3000001});
  if (enters) {
    for (int i = 0; i < 20 * size; i++) simulation_turn(&simulation);
    simulation.ranks[size - 1].sleeps_until_ns = UINT64_MAX;
  }
  run_until(&simulation, begun, enters ? 59 : 299);
  for (int32_t rank = 0; rank < size - 1; rank++) REQUIRE(!simulated_has_ended(&operations[rank]));
  run_until(&simulation, begun, enters ? 62 : 302);
  for (int32_t rank = 0; rank < size - 1; rank++) {
    REQUIRE(simulated_end(&operations[rank]) == MLXDIST_TIMEOUT);
    REQUIRE(strstr(mlxdist_last_error(), late));
  }
  if (enters) {
    simulation.ranks[size - 1].sleeps_until_ns = 0;
    simulation_run(&simulation, 62 * SECOND); /* it has its own deadline: no abort fitted into its receives */
    REQUIRE(simulated_end(&operations[size - 1]) == MLXDIST_TIMEOUT);
  }
  simulation_close(&simulation);
}

int main(void) {
  REQUIRE(mlxdist_debug_open("off", -1, 0) == MLXDIST_OK);
  test_link_flaps();
  test_late_repetitions();
  for (int32_t size = 2; size <= 4; size++) {
    test_deadline(size, false);
    test_deadline(size, true);
  }
  printf("engine_timers_test passed\n");
  return 0;
}
