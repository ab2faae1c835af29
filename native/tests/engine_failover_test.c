/* Several cables between every two ranks: large messages use all, and one that dies is dropped until it works again. */
#include "engine.h"
#include "group.h"
#include "sums.h"

#define LARGE 1000003
#define COPIED 40000 /* an operation ends before what left of it has left the send queue */
#define MILLISECOND 1000u

static uint32_t cables, seed; /* of the world that runs */

static uint64_t bytes_by(mlxdist_group *group, uint32_t cable) {
  struct verbs_counters counters = {0};
  struct engine *engine = group->engine;
  engine_lock(engine);
  engine->transport.devices[cable].verbs->read_counters(engine->transport.devices[cable].context, &counters);
  engine_unlock(engine);
  return counters.bytes_sent;
}

/* Messages with data that have left by a cable for the first time. */
static uint32_t messages_by(const mlxdist_group *group, int rank, uint32_t cable) {
  struct engine *engine = group->engine;
  uint32_t sent = 0;
  engine_lock(engine);
  for (int peer = 0; peer < engine->size; peer++) {
    const struct channel *channels = &engine->peers[peer].endpoint.channels[2 * (size_t)cable];
    if (peer != rank) sent += channels[WIRE_EAGER].sent + channels[WIRE_BULK].sent;
  }
  engine_unlock(engine);
  return sent;
}

static uint32_t dead_links(const mlxdist_group *group, int peer) {
  engine_lock(group->engine);
  uint32_t dead = group->engine->peers[peer].endpoint.dead_links;
  engine_unlock(group->engine);
  return dead;
}

static mlxdist_group *join(struct world *world, int rank, int *barriers, double timeout) {
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.links_per_peer = cables;
  if (timeout > 0) options.timeout = options.entry_timeout = timeout;
  return world_join(world, rank, barriers, &options);
}

/* "2:drop=1/1" */
static void inject(mlxdist_group *group, uint32_t cable, const char *fault) {
  char faults[64];
  snprintf(faults, sizeof faults, "%u:%s", cable, fault);
  REQUIRE(mlxdist_group_inject_faults(group, faults) == MLXDIST_OK);
}

static void sums(mlxdist_group *group, int rank, int size, int large, int small) {
  for (int i = 0; i < large; i++) REQUIRE(all_sum(group, rank, size, LARGE) == MLXDIST_OK);
  for (int i = 0; i < small; i++) REQUIRE(all_sum(group, rank, size, 10) == MLXDIST_OK);
}

/* Until all ranks have found the same links dead: how long that takes is not looked at. */
static void sum_until(mlxdist_group *group, int rank, int size, uint64_t count, uint32_t dead) {
  int32_t ends = 0, all = 0;
  mlxdist_layout layout = {.dtype = MLXDIST_INT32, .ndim = 1, .shape = {1}};
  while (all < size) {
    REQUIRE(all_sum(group, rank, size, count) == MLXDIST_OK && all_sum(group, rank, size, 10) == MLXDIST_OK);
    ends = 1;
    for (int peer = 0; peer < size; peer++) ends &= peer == rank || dead_links(group, peer) == dead;
    REQUIRE(mlxdist_all_reduce(group, &ends, &all, &layout, MLXDIST_SUM, 0) == MLXDIST_OK);
    usleep(MILLISECOND);
  }
}

/* Each carries at least half of an even share. */
static void all_are_used(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = join(world, rank, &barriers, 0);
  sums(group, rank, size, 5, 1);
  uint64_t all = 0;
  for (uint32_t cable = 0; cable < cables; cable++) all += bytes_by(group, cable);
  for (uint32_t cable = 0; cable < cables; cable++) REQUIRE(bytes_by(group, cable) > all / (2ull * cables));
  world_leave(world, group, &barriers);
}

/* Nothing of what this rank sends by one cable arrives any more: the others take over, without an error. */
static void one_dies(struct world *world, int rank, int size, uint32_t cable, bool everywhere) {
  int barriers = 0;
  mlxdist_group *group = join(world, rank, &barriers, 0);
  sums(group, rank, size, 1, 0);
  if (everywhere || rank == 0) inject(group, cable, "drop=1/1");
  sums(group, rank, size, 3, 0);
  uint32_t before = messages_by(group, rank, cable);
  sums(group, rank, size, 3, 100);
  if (everywhere || rank == 0) REQUIRE(messages_by(group, rank, cable) == before);
  world_leave(world, group, &barriers);
}

static void first_dies(struct world *world, int rank, int size) { one_dies(world, rank, size, 0, true); }
static void last_dies(struct world *world, int rank, int size) { one_dies(world, rank, size, cables - 1, true); }
static void first_dies_one_way(struct world *world, int rank, int size) { one_dies(world, rank, size, 0, false); }

static uint32_t draw(uint64_t *state, uint32_t limit) {
  *state = *state * 6364136223846793005ull + 1442695040888963407ull;
  return (uint32_t)(*state >> 33) % limit;
}

/* The cables in an order of chance. */
static void shuffle(uint32_t order[], uint64_t *state) {
  for (uint32_t i = 0; i < cables; i++) {
    uint32_t j = draw(state, i + 1);
    order[i] = order[j];
    order[j] = i;
  }
}

struct killer {
  mlxdist_group *group;
  uint32_t cable, after_us;
};

static void *kill_cable(void *argument) {
  const struct killer *killer = argument;
  usleep(killer->after_us);
  inject(killer->group, killer->cable, "drop=1/1");
  return 0;
}

/* All but one die, in an order and at moments of chance: some while messages of another one are on their way to a
 * third, on one rank or on all. */
static void die_one_after_the_other(struct world *world, int rank, int size) {
  int barriers = 0;
  uint64_t same = seed, own = seed * 31ull + (uint64_t)rank;
  uint32_t order[MLXDIST_MAX_LINKS];
  mlxdist_group *group = join(world, rank, &barriers, 0);
  shuffle(order, &same);
  for (uint32_t i = 0; i + 1 < cables; i++) {
    struct killer killer = {group, order[i], draw(&own, i % 2 ? 900 : 5) * MILLISECOND};
    int on = (int)draw(&same, (uint32_t)size + 1);
    pthread_t thread;
    bool here = on == size || on == rank;
    if (here) REQUIRE(pthread_create(&thread, 0, kill_cable, &killer) == 0);
    sums(group, rank, size, 2 + (int)draw(&same, 4), (int)draw(&same, 50));
    if (here && draw(&own, 2)) usleep(killer.after_us);
    if (here) REQUIRE(pthread_join(thread, 0) == 0);
  }
  sums(group, rank, size, 5, 100);
  world_leave(world, group, &barriers);
}

/* All but the last at one moment: a probe by the next one is lost, too. */
static void die_together(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = join(world, rank, &barriers, 0);
  sums(group, rank, size, 1, 1);
  for (uint32_t cable = 0; cable + 1 < cables; cable++) inject(group, cable, "drop=1/1");
  sum_until(group, rank, size, LARGE, (1u << (cables - 1)) - 1);
  world_leave(world, group, &barriers);
}

static void all_die(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = join(world, rank, &barriers, 2);
  sums(group, rank, size, 1, 1);
  world_barrier(world, &barriers);
  for (uint32_t cable = 0; cable < cables; cable++) inject(group, cable, "drop=1/1");
  REQUIRE(all_sum(group, rank, size, LARGE) == MLXDIST_TIMEOUT);
  char peer[16];
  snprintf(peer, sizeof peer, "rank %d", !rank);
  REQUIRE(strstr(mlxdist_last_error(), peer));
  world_barrier(world, &barriers);
  mlxdist_group_destroy(group);
}

/* Each dies and comes back, one after the other. In the end the others die: it carries all. */
static void come_back(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = join(world, rank, &barriers, 0);
  sums(group, rank, size, 1, 1);
  for (uint32_t cable = 0; cable < cables; cable++) {
    inject(group, cable, "link=down");
    sum_until(group, rank, size, LARGE, 1u << cable);
    inject(group, cable, "link=up");
    sum_until(group, rank, size, LARGE, 0);
    uint32_t before = messages_by(group, rank, cable);
    sums(group, rank, size, 2, 0);
    REQUIRE(messages_by(group, rank, cable) != before);
  }
  for (uint32_t cable = 0; cable + 1 < cables; cable++) inject(group, cable, "drop=1/1");
  sum_until(group, rank, size, LARGE, (1u << (cables - 1)) - 1);
  world_leave(world, group, &barriers);
}

/* It is so slow that it counts as dead. What left by it arrives after all, behind what left by others instead. */
static void one_is_late(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = join(world, rank, &barriers, 0);
  sums(group, rank, size, 1, 1);
  uint32_t cable = seed % cables;
  inject(group, cable, "delay=2000000");
  sum_until(group, rank, size, COPIED, 1u << cable);
  inject(group, cable, "delay=0");
  sum_until(group, rank, size, COPIED, 0);
  sums(group, rank, size, 3, 50);
  world_leave(world, group, &barriers);
}

/* All that rank 1 has to send are acknowledgements, by the link that loses them. Nothing but the sender's probes shows
 * it: they leave by all links from then on. */
static void acknowledgements_are_lost(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = join(world, rank, &barriers, 0);
  mlxdist_layout layout = {.dtype = MLXDIST_INT32, .ndim = 1, .shape = {LARGE}};
  int32_t *data = malloc(LARGE * sizeof *data);
  REQUIRE(data);
  sums(group, rank, size, 1, 1);
  if (rank == 1) inject(group, 0, "drop=1/1");
  for (int i = 0; i < 10; i++) {
    for (int k = 0; k < LARGE; k++) data[k] = rank ? -1 : sums_value(i, (uint64_t)k);
    REQUIRE(mlxdist_broadcast(group, data, &layout, 0, 0) == MLXDIST_OK);
    for (int k = 0; k < LARGE; k++) REQUIRE(data[k] == sums_value(i, (uint64_t)k));
  }
  if (rank == 1) REQUIRE(group->engine->peers[0].endpoint.acks_by_all);
  free(data);
  world_leave(world, group, &barriers);
}

/* Its queue pairs fail, and there is no side channel to re-create them by. */
static void one_fails(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_group *group = join(world, rank, &barriers, 0);
  sums(group, rank, size, 1, 1);
  inject(group, seed % cables, "error=1/1");
  sum_until(group, rank, size, LARGE, 1u << seed % cables);
  world_leave(world, group, &barriers);
}

static int run(int size, uint32_t of, uint32_t from, rank_function function) {
  cables = of;
  seed = from;
  int failed = world_run(size, function);
  if (failed) fprintf(stderr, "with %u cables, seed %u\n", of, from);
  return failed;
}

static int run_all(uint32_t of) {
  static const rank_function functions[] = {
      all_are_used, first_dies, last_dies, first_dies_one_way,        die_together,
      all_die,      come_back,  one_fails, acknowledgements_are_lost, one_is_late};
  int failed = run(3, of, 0, all_are_used);
  for (size_t i = 0; i < sizeof functions / sizeof *functions; i++) failed |= run(2, of, 0, functions[i]);
  failed |= run(2, of, 1, one_is_late);
  for (uint32_t from = 1; from <= 3; from++) failed |= run(2, of, 10 * of + from, die_one_after_the_other);
  failed |= run(3, of, 1, of == 3 ? come_back : die_one_after_the_other);
  return failed;
}

/* They wait most of the time, so they run at once. */
int main(void) {
  REQUIRE(mlxdist_debug_open("off", -1, 0) == MLXDIST_OK);
  int failed = 0, status;
  for (uint32_t of = 2; of <= MLXDIST_MAX_LINKS; of++)
    if (fork() == 0) exit(run_all(of));
  while (wait(&status) > 0) failed |= status != 0;
  if (!failed) printf("engine_failover_test passed\n");
  return failed;
}
