/* Queue pairs that fall silent when nothing is sent, as Thunderbolt's do: signs of life keep them awake, without them
 * they are re-created, and a cable that was pulled meanwhile is noticed before anything is posted. */
#include "group.h"
#include "simulation.h"

#define LARGE 1000003

static mlxdist_options options_of(const char *profile, double keepalive, uint32_t cables) {
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.soft_profile = profile;
  options.keepalive = keepalive;
  options.links_per_peer = cables;
  return options;
}

static void sums(struct simulation *simulation) {
  static const uint64_t counts[] = {1, 900, LARGE, 10, LARGE};
  for (int i = 0; i < 5; i++) REQUIRE(simulation_sum(simulation, counts[i]) == MLXDIST_OK);
}

/* Opens ranks that have exchanged something, all of which is confirmed. */
static void open_ranks(struct simulation *simulation, int32_t size, const mlxdist_options *options, bool side_channel) {
  simulation_open(simulation, size, options, side_channel, 1);
  sums(simulation);
  simulation_run(simulation, SECOND / 5);
}

/* Longer than the queue pairs stand it. Each of them has said something meanwhile, and nothing was lost. */
static void test_pauses(int32_t size, const char *profile, uint32_t cables) {
  struct simulation simulation;
  mlxdist_options options = options_of(profile, 0.05, cables);
  mlxdist_stats before[WORLD_MAX_RANKS];
  open_ranks(&simulation, size, &options, true);
  for (int32_t rank = 0; rank < size; rank++) before[rank] = simulation_stats(&simulation, rank);
  simulation_inject(&simulation, -1, "idle=1000");
  simulation_run(&simulation, 3 * SECOND);
  uint64_t queue_pairs = 2 * cables * (uint64_t)(size - 1);
  for (int32_t rank = 0; rank < size; rank++) {
    mlxdist_stats after = simulation_stats(&simulation, rank);
    REQUIRE(after.control_messages_sent - before[rank].control_messages_sent >= 3 * queue_pairs);
    REQUIRE(after.messages_received - before[rank].messages_received >= 3 * queue_pairs);
    REQUIRE(after.receives_posted == (options.eager_slots + options.bulk_slots) * queue_pairs / 2);
  }
  sums(&simulation);
  for (int32_t rank = 0; rank < size; rank++) {
    mlxdist_stats after = simulation_stats(&simulation, rank);
    REQUIRE(after.provider_dropped_by_fault == 0 && after.reconnections == 0);
  }
  simulation_close(&simulation);
}

/* Without keepalives nothing arrives after the pause: the queue pairs are re-created, if there is a way to agree. */
static void test_silence(int32_t size, const char *profile, uint32_t cables) {
  struct simulation simulation;
  mlxdist_options options = options_of(profile, 0, cables);
  open_ranks(&simulation, size, &options, true);
  simulation_inject(&simulation, -1, "idle=100");
  simulation_run(&simulation, SECOND / 2);
  REQUIRE(simulation_sum(&simulation, LARGE) == MLXDIST_OK);
  simulation_inject(&simulation, -1, "idle=0");
  sums(&simulation);
  for (int32_t rank = 0; rank < size; rank++) {
    const struct peer *peer = &simulation.ranks[rank].group->engine->peers[(rank + 1) % size];
    uint32_t recreated = 0;
    for (uint32_t i = 0; i < peer->endpoint.channel_count; i++) recreated += peer->endpoint.channels[i].epoch > 0;
    REQUIRE(recreated >= 2 && simulation_stats(&simulation, rank).provider_dropped_by_fault > 0);
  }
  simulation_close(&simulation);
}

static void test_silence_for_good(void) {
  struct simulation simulation;
  mlxdist_options options = options_of("ideal", 0, 1);
  options.timeout = options.entry_timeout = 1;
  open_ranks(&simulation, 2, &options, false);
  simulation_inject(&simulation, -1, "idle=50");
  simulation_run(&simulation, SECOND / 5);
  REQUIRE(simulation_sum(&simulation, 10) == MLXDIST_TIMEOUT);
  simulation_close(&simulation);
}

/* After a rest the port is looked at first. */
static void test_pulled(void) {
  struct simulation simulation;
  uint64_t posted[2];
  mlxdist_options options = options_of("apple-tb5", 0, 1);
  open_ranks(&simulation, 2, &options, false);
  simulation_inject(&simulation, -1, "link=down");
  simulation_run(&simulation, 2 * SECOND);
  for (int rank = 0; rank < 2; rank++) posted[rank] = simulation_stats(&simulation, rank).provider_sends;
  REQUIRE(simulation_sum(&simulation, 10) == MLXDIST_TRANSPORT);
  REQUIRE(strstr(mlxdist_last_error(), "the port of device soft0, by which rank "));
  REQUIRE(strstr(mlxdist_last_error(), "is the cable plugged in at both ends?"));
  for (int rank = 0; rank < 2; rank++) REQUIRE(simulation_stats(&simulation, rank).provider_sends == posted[rank]);
  simulation_close(&simulation);
}

/* A sign of life meets it too. */
static void test_pulled_in_a_pause(void) {
  struct simulation simulation;
  mlxdist_options options = options_of("apple-tb5", 0.2, 1);
  open_ranks(&simulation, 2, &options, false);
  simulation_inject(&simulation, -1, "link=down");
  simulation_run(&simulation, 10 * SECOND);
  for (int rank = 0; rank < 2; rank++) {
    REQUIRE(mlxdist_group_error(simulation.ranks[rank].group) == MLXDIST_TRANSPORT);
    REQUIRE(strstr(mlxdist_last_error(), "is down; is the cable"));
  }
  simulation_close(&simulation);
}

/* One of several: what it carried goes by the others, and it is used again once it is plugged in. */
static void test_one_pulled(uint32_t cables) {
  struct simulation simulation;
  mlxdist_options options = options_of("apple-tb5", 0, cables);
  open_ranks(&simulation, 2, &options, false);
  simulation_inject(&simulation, -1, "0:link=down");
  simulation_run(&simulation, 2 * SECOND);
  sums(&simulation);
  for (int rank = 0; rank < 2; rank++) {
    REQUIRE(simulation.ranks[rank].group->engine->peers[!rank].endpoint.dead_links == 1);
    REQUIRE(simulation_stats(&simulation, rank).provider_dropped_by_fault == 0);
  }
  simulation_inject(&simulation, -1, "0:link=up");
  simulation_run(&simulation, 5 * SECOND);
  for (int rank = 0; rank < 2; rank++)
    REQUIRE(simulation.ranks[rank].group->engine->peers[!rank].endpoint.dead_links == 0);
  sums(&simulation);
  simulation_close(&simulation);
}

int main(void) {
  REQUIRE(mlxdist_debug_open("off", -1, 0) == MLXDIST_OK);
  static const struct {
    int32_t size;
    const char *profile;
    uint32_t cables;
  } worlds[] = {{2, "ideal", 1}, {3, "ideal", 1}, {2, "ideal", 2}, {2, "ideal", 4}, {2, "apple-tb5", 1}};
  for (size_t i = 0; i < sizeof worlds / sizeof *worlds; i++) {
    test_pauses(worlds[i].size, worlds[i].profile, worlds[i].cables);
    test_silence(worlds[i].size, worlds[i].profile, worlds[i].cables);
  }
  test_silence_for_good();
  test_pulled();
  test_pulled_in_a_pause();
  test_one_pulled(2);
  test_one_pulled(4);
  printf("engine_keepalive_test passed\n");
  return 0;
}
