/* Queue pairs that fall silent when nothing is sent, as Thunderbolt's do: signs of life keep them awake, without them
 * they are re-created, and a cable that was pulled meanwhile is noticed before anything is posted. */
#include "engine.h"
#include "group.h"
#include "sums.h"

#define LARGE 1000003
#define SECOND 1000000u

static mlxdist_options options_of(const char *profile, double keepalive, uint32_t cables) {
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.soft_profile = profile;
  options.keepalive = keepalive;
  options.links_per_peer = cables;
  return options;
}

static mlxdist_stats stats_of(mlxdist_group *group) {
  mlxdist_stats stats;
  mlxdist_group_stats(group, &stats);
  return stats;
}

static void sums(mlxdist_group *group, int rank, int size) {
  static const uint64_t counts[] = {1, 900, LARGE, 10, LARGE};
  for (int i = 0; i < 5; i++) REQUIRE(all_sum(group, rank, size, counts[i]) == MLXDIST_OK);
}

/* Longer than the queue pairs stand it. Each of them has said something meanwhile, and nothing was lost. */
static void pauses(struct world *world, int rank, int size, const char *profile, uint32_t cables) {
  int barriers = 0;
  struct world_side side;
  mlxdist_options options = options_of(profile, 0.05, cables);
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  world_side_open(&side, world, group, rank);
  sums(group, rank, size);
  world_barrier(world, &barriers);
  mlxdist_stats before = stats_of(group);
  REQUIRE(mlxdist_group_inject_faults(group, "idle=1000") == MLXDIST_OK);
  usleep(3 * SECOND);
  mlxdist_stats after = stats_of(group);
  uint64_t queue_pairs = 2 * cables * (uint64_t)(size - 1);
  REQUIRE(after.control_messages_sent - before.control_messages_sent >= 3 * queue_pairs);
  REQUIRE(after.messages_received - before.messages_received >= 3 * queue_pairs);
  uint64_t slots = options.eager_slots + options.bulk_slots; /* all receives are posted again */
  bool all_posted = false;                                   /* but for one that is being taken when this looks */
  for (int i = 0; i < 100 && !all_posted; i++) {
    usleep(SECOND / 200);
    all_posted = stats_of(group).receives_posted == slots * queue_pairs / 2;
  }
  REQUIRE(all_posted);
  world_barrier(world, &barriers); /* the first message of what follows would wait in its slot */
  sums(group, rank, size);
  after = stats_of(group);
  REQUIRE(after.provider_dropped_by_fault == 0 && after.reconnections == 0);
  world_side_leave(&side, &barriers);
}

static void on_ideal(struct world *world, int rank, int size) { pauses(world, rank, size, "ideal", 1); }
static void on_two_cables(struct world *world, int rank, int size) { pauses(world, rank, size, "ideal", 2); }
static void on_thunderbolt(struct world *world, int rank, int size) { pauses(world, rank, size, "apple-tb5", 1); }

/* Without keepalives nothing arrives after the pause: the queue pairs are re-created, if there is a way to agree. */
static void silent(struct world *world, int rank, int size, const char *profile, uint32_t cables) {
  int barriers = 0;
  struct world_side side;
  mlxdist_options options = options_of(profile, 0, cables);
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  world_side_open(&side, world, group, rank);
  sums(group, rank, size);
  world_barrier(world, &barriers);
  usleep(SECOND / 5); /* what is confirmed late */
  REQUIRE(mlxdist_group_inject_faults(group, "idle=100") == MLXDIST_OK);
  usleep(SECOND / 2);
  world_barrier(world, &barriers);
  REQUIRE(all_sum(group, rank, size, LARGE) == MLXDIST_OK);
  REQUIRE(mlxdist_group_inject_faults(group, "idle=0") == MLXDIST_OK);
  sums(group, rank, size);
  const struct peer *peer = &group->engine->peers[(rank + 1) % size];
  uint32_t recreated = 0;
  for (uint32_t i = 0; i < peer->endpoint.channel_count; i++) recreated += peer->endpoint.channels[i].epoch > 0;
  REQUIRE(recreated >= 2 && stats_of(group).provider_dropped_by_fault > 0);
  world_side_leave(&side, &barriers);
}

static void silent_on_ideal(struct world *world, int rank, int size) { silent(world, rank, size, "ideal", 1); }
static void silent_on_two(struct world *world, int rank, int size) { silent(world, rank, size, "ideal", 2); }
static void silent_on_thunderbolt(struct world *world, int rank, int size) {
  silent(world, rank, size, "apple-tb5", 1);
}

static void silent_for_good(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_options options = options_of("ideal", 0, 1);
  options.timeout = options.entry_timeout = 1;
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  sums(group, rank, size);
  world_barrier(world, &barriers);
  REQUIRE(mlxdist_group_inject_faults(group, "idle=50") == MLXDIST_OK);
  usleep(SECOND / 5);
  REQUIRE(all_sum(group, rank, size, 10) == MLXDIST_TIMEOUT);
  world_barrier(world, &barriers);
  mlxdist_group_destroy(group);
}

/* After a rest the port is looked at first. */
static void pulled(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_options options = options_of("apple-tb5", 0, 1);
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  sums(group, rank, size);
  world_barrier(world, &barriers);
  REQUIRE(mlxdist_group_inject_faults(group, "link=down") == MLXDIST_OK);
  usleep(2 * SECOND);
  uint64_t posted = stats_of(group).provider_sends;
  REQUIRE(all_sum(group, rank, size, 10) == MLXDIST_TRANSPORT);
  REQUIRE(strstr(mlxdist_last_error(), "the port of device soft0, by which rank "));
  REQUIRE(strstr(mlxdist_last_error(), "is the cable plugged in at both ends?"));
  REQUIRE(stats_of(group).provider_sends == posted);
  world_barrier(world, &barriers);
  mlxdist_group_destroy(group);
}

/* A sign of life meets it too. */
static void pulled_in_a_pause(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_options options = options_of("apple-tb5", 0.2, 1);
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  sums(group, rank, size);
  world_barrier(world, &barriers);
  REQUIRE(mlxdist_group_inject_faults(group, "link=down") == MLXDIST_OK);
  for (int i = 0; i < 100 && !mlxdist_group_error(group); i++) usleep(SECOND / 10);
  REQUIRE(mlxdist_group_error(group) == MLXDIST_TRANSPORT && strstr(mlxdist_last_error(), "is down; is the cable"));
  world_barrier(world, &barriers);
  mlxdist_group_destroy(group);
}

static void one_of_two_pulled(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_options options = options_of("apple-tb5", 0, 2);
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  sums(group, rank, size);
  world_barrier(world, &barriers);
  usleep(SECOND / 5); /* what is confirmed late */
  REQUIRE(mlxdist_group_inject_faults(group, "0:link=down") == MLXDIST_OK);
  usleep(2 * SECOND);
  sums(group, rank, size);
  REQUIRE(group->engine->peers[!rank].endpoint.dead_links == 1);
  REQUIRE(stats_of(group).provider_dropped_by_fault == 0);
  world_leave(world, group, &barriers);
}

/* They sleep most of the time, so some run at once; all would need more queue pairs than the devices have. */
#define AT_ONCE 4
static const struct {
  int size;
  rank_function function;
} worlds[] = {
    {2, on_ideal},        {3, on_ideal},        {2, on_two_cables},     {2, on_thunderbolt},
    {2, silent_on_ideal}, {3, silent_on_ideal}, {2, silent_on_two},     {2, silent_on_thunderbolt},
    {2, silent_for_good}, {2, pulled},          {2, pulled_in_a_pause}, {2, one_of_two_pulled},
};

static int run_some(size_t first) {
  for (size_t i = first; i < first + AT_ONCE; i++)
    if (fork() == 0) exit(world_run(worlds[i].size, worlds[i].function));
  int failed = 0, status;
  while (wait(&status) > 0) failed |= status != 0;
  return failed;
}

int main(void) {
  REQUIRE(mlxdist_debug_open("off", -1, 0) == MLXDIST_OK);
  int failed = 0;
  for (size_t first = 0; first < sizeof worlds / sizeof *worlds; first += AT_ONCE) failed |= run_some(first);
  if (!failed) printf("engine_keepalive_test passed\n");
  return failed;
}
