/* Random programs of 2 to 4 ranks over random devices that lose, repeat, damage and delay, with cables that are pulled,
 * queue pairs that fail, and ranks that stand still, on a simulated clock: every result is right, and comes.
 *
 *   simulation_test [FIRST [COUNT]]     the runs with these seeds
 *
 * It prints the seed of a run that fails, with which that fails again. */
#include "simulation.h"

#include "group.h"

#include <inttypes.h>

#define STEPS 40
#define AT_ONCE 6
#define LIMIT_NS (600 * SECOND)

/* Counts of all runs. One that stays 0 is of something that they do not test. */
struct met {
  uint64_t milliseconds, turns, retransmissions, duplicates, damaged, reconnections, dead_links;
};
static struct met *met; /* shared with the processes of the runs */

struct run {
  struct simulation simulation;
  int32_t size;
  struct simulated_step steps[STEPS];
  struct simulated_operation operations[WORLD_MAX_RANKS][STEPS];
  int started[WORLD_MAX_RANKS], ended[WORLD_MAX_RANKS];
  mlxdist_options options;
  uint64_t digest;
};

static uint64_t draw(struct run *run, uint64_t limit) { return simulation_draw(&run->simulation, limit); }
static bool chance(struct run *run, uint64_t of) { return draw(run, of) == 0; }

/* FNV-1a over words. */
static void note(struct run *run, uint64_t word) { run->digest = (run->digest ^ word) * UINT64_C(1099511628211); }

static const char *draw_profile(struct run *run) {
  static const char *const profiles[] = {"ideal", "apple-tb5", "apple-tb5-27", "apple-odd", "rxe"};
  return profiles[draw(run, sizeof profiles / sizeof *profiles)];
}

/* Two on each of two hosts have collectives with a hierarchy. */
static const int32_t *draw_hosts(struct run *run) {
  static const int32_t side_by_side[] = {0, 0, 1, 1}, in_turns[] = {0, 1, 0, 1};
  if (run->size != 4) return 0;
  return chance(run, 3) ? side_by_side : chance(run, 2) ? in_turns : 0;
}

static void draw_options(struct run *run) {
  mlxdist_default_options(&run->options);
  run->options.soft_profile = draw_profile(run);
  run->options.bulk_slot_bytes = chance(run, 2) ? 8192 : 65536;
  run->options.bulk_slots = 2 + (uint32_t)draw(run, 6);
  run->options.eager_slots = 4 + (uint32_t)draw(run, 12);
  run->options.links_per_peer = 1 + (uint32_t)draw(run, MLXDIST_MAX_LINKS);
  run->options.hosts = draw_hosts(run);
  run->options.algo = (int32_t)draw(run, MLXDIST_HIERARCHICAL + 1);
  run->options.checksum = 1;
  run->options.keepalive = chance(run, 2) ? 0.05 : 0;
  run->options.timeout = run->options.entry_timeout = 0;
}

static void draw_steps(struct run *run) {
  static const uint64_t counts[] = {0, 1, 5, 900, 1019, 2000, 16384, 40000, 100001};
  for (int i = 0; i < STEPS; i++)
    run->steps[i] = (struct simulated_step){.kind = (enum simulated_kind)draw(run, SIMULATED_KINDS),
                                            .count = counts[draw(run, sizeof counts / sizeof *counts)],
                                            .root = (int32_t)draw(run, (uint64_t)run->size),
                                            .salt = draw(run, 1000)};
}

/* What a rank's sends by a link suffer, from now on; by the last of several nothing that takes it for dead. */
static void draw_faults(struct run *run, int32_t rank) {
  static const char *const faults[] = {
      "none",           "delay=100,jitter=3000",
      "duplicate=1/10", "drop=1/100",
      "drop=1/10",      "duplicate=1/10,drop=1/50",
      "truncate=1/50",  "corrupt=1/50",
      "error=1/200",    "drop=1/30,duplicate=1/30,truncate=1/60,corrupt=1/60,jitter=500",
      "drop_next=3",    "error_next=1",
      "lose=1/200",     "delay=800000", /* longer than it takes to doubt a link */
      "drop=1/1",       "error=1/1"};
  enum { HARMLESS = 3, CURABLE = 13, FAULTS = sizeof faults / sizeof *faults };
  uint32_t links = run->options.links_per_peer, link = (uint32_t)draw(run, links);
  uint64_t kinds = links == 1 ? CURABLE : link == links - 1 ? HARMLESS : FAULTS;
  char list[128];
  snprintf(list, sizeof list, "%u:seed=%u,none,%s", link, (unsigned)draw(run, 1u << 31), faults[draw(run, kinds)]);
  simulation_inject(&run->simulation, rank, list);
}

/* Any but the last, of all ranks or one: that one stays. */
static void pull_cable(struct run *run, int32_t rank) {
  uint32_t links = run->options.links_per_peer;
  if (links < 2) return;
  char list[32];
  snprintf(list, sizeof list, "%u:link=%s", (unsigned)draw(run, links - 1), chance(run, 2) ? "down" : "up");
  simulation_inject(&run->simulation, chance(run, 2) ? -1 : rank, list);
}

static void disturb(struct run *run) {
  int32_t rank = (int32_t)draw(run, (uint64_t)run->size);
  uint64_t what = draw(run, 4);
  if (what == 0) draw_faults(run, rank);
  if (what == 1) pull_cable(run, rank);
  if (what == 2) run->simulation.ranks[rank].sleeps_until_ns = run->simulation.now_ns + draw(run, 300 * MILLISECOND);
}

/* A barrier ends nowhere before it has begun everywhere. */
static void check_barrier(const struct run *run, int step) {
  for (int rank = 0; rank < run->size && run->steps[step].kind == SIMULATED_BARRIER; rank++)
    REQUIRE(run->started[rank] > step);
}

static void call_and_collect(struct run *run, int32_t rank) {
  int *started = &run->started[rank], *ended = &run->ended[rank];
  struct simulated_operation *operations = run->operations[rank];
  if (*started < STEPS && *started - *ended < AT_ONCE && chance(run, 20)) {
    simulated_start(&operations[*started], run->simulation.ranks[rank].group, run->steps[*started]);
    REQUIRE(operations[(*started)++].status == MLXDIST_OK);
  }
  while (*ended < *started && simulated_has_ended(&operations[*ended])) {
    check_barrier(run, *ended);
    REQUIRE(simulated_end(&operations[*ended]) == MLXDIST_OK);
    note(run, run->simulation.now_ns ^ (uint64_t)(*ended)++ << 48 ^ (uint64_t)rank << 56);
  }
}

static bool has_ended(const struct run *run) {
  for (int rank = 0; rank < run->size; rank++)
    if (run->ended[rank] < STEPS) return false;
  return true;
}

static void add_up(const struct run *run) {
  met->milliseconds += run->simulation.now_ns / MILLISECOND;
  met->turns += run->simulation.turns;
  for (int32_t rank = 0; rank < run->size; rank++) {
    mlxdist_stats stats = simulation_stats(&run->simulation, rank);
    met->retransmissions += stats.retransmissions;
    met->duplicates += stats.duplicates;
    met->damaged += stats.damaged;
    met->reconnections += stats.reconnections;
    for (int32_t peer = 0; peer < run->size; peer++)
      met->dead_links += run->simulation.ranks[rank].group->engine->peers[peer].endpoint.dead_links != 0;
  }
}

/* Returns a number that two runs share only where all ended alike at the same times. */
static uint64_t run_seed(uint64_t seed) {
  struct run *run = calloc(1, sizeof *run);
  REQUIRE(run);
  run->simulation.generator = seed;
  run->digest = UINT64_C(14695981039346656037);
  run->size = 2 + (int32_t)draw(run, 3);
  draw_options(run);
  simulation_open(&run->simulation, run->size, &run->options, true, draw(run, UINT64_MAX));
  draw_steps(run);
  for (int rank = 0; rank < run->size; rank++) draw_faults(run, rank);
  while (!has_ended(run)) {
    REQUIRE(run->simulation.now_ns < LIMIT_NS);
    if (chance(run, 5000)) disturb(run);
    simulation_turn(&run->simulation);
    for (int32_t rank = 0; rank < run->size; rank++)
      if (run->simulation.ranks[rank].sleeps_until_ns <= run->simulation.now_ns) call_and_collect(run, rank);
  }
  add_up(run);
  uint64_t digest = run->digest;
  simulation_close(&run->simulation);
  free(run);
  return digest;
}

/* In a process of its own, so that its failure says which it is. */
static int run_apart(uint64_t seed) {
  pid_t child = fork();
  if (child == 0) {
    alarm(WORLD_SECONDS);
    uint64_t digest = run_seed(seed);
    if (seed % 8 == 0) REQUIRE(run_seed(seed) == digest);
    exit(0);
  }
  int status;
  waitpid(child, &status, 0);
  if (status)
    fprintf(stderr, "simulation_test: the run with seed %" PRIu64 " ended with status 0x%x\n", seed, (unsigned)status);
  return status != 0;
}

int main(int argc, char **argv) {
  uint64_t first = argc > 1 ? strtoull(argv[1], 0, 0) : 1, count = argc > 2 ? strtoull(argv[2], 0, 0) : 100;
  REQUIRE(mlxdist_debug_open("off", -1, 0) == MLXDIST_OK);
  met = mmap(0, sizeof *met, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
  REQUIRE(met != MAP_FAILED);
  int failed = 0;
  for (uint64_t seed = first; seed < first + count && !failed; seed++) failed = run_apart(seed);
  if (!failed)
    printf("%" PRIu64 " runs, %" PRIu64 " ms, %" PRIu64 " turns, %" PRIu64 " retransmissions, %" PRIu64
           " duplicates, %" PRIu64 " damaged, %" PRIu64 " reconnections, %" PRIu64 " dead_links\n",
           count, met->milliseconds, met->turns, met->retransmissions, met->duplicates, met->damaged,
           met->reconnections, met->dead_links);
  return failed;
}
