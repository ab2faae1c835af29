#include "simulation.h"

#include "group.h"
#include "progress.h"
#include "progress_thread.h"
#include "side_channel.h"
#include "simulated_clock.h"
#include "timers.h"

/* A turn takes up to this long; with nothing to do for a while, as long as the progress thread sleeps. */
#define TURN_NS 5000
#define IDLE_NS 500000

/* splitmix64 (Steele et al. 2014). */
uint64_t simulation_draw(struct simulation *simulation, uint64_t limit) {
  uint64_t z = simulation->generator += UINT64_C(0x9e3779b97f4a7c15);
  z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
  z = (z ^ (z >> 27)) * UINT64_C(0x94d049bb133111eb);
  return (z ^ (z >> 31)) % limit;
}

static void send_aside(void *context, int32_t to, const void *bytes, uint64_t length) {
  const struct simulated_rank *from = context;
  struct simulation *simulation = from->simulation;
  REQUIRE(simulation->message_count < SIMULATED_MESSAGES);
  struct simulated_message *message = &simulation->messages[simulation->message_count++];
  REQUIRE(length <= sizeof message->bytes);
  *message = (struct simulated_message){.from = from->rank, .to = to, .length = length};
  message->arrives_ns = simulation->now_ns + simulation_draw(simulation, 2 * MILLISECOND);
  for (int i = 0; i + 1 < simulation->message_count; i++) { /* a connection keeps their order */
    const struct simulated_message *before = &simulation->messages[i];
    if (before->from == message->from && before->to == to && before->arrives_ns > message->arrives_ns)
      message->arrives_ns = before->arrives_ns;
  }
  memcpy(message->bytes, bytes, length);
}

static void connect_all(struct simulation *simulation) {
  char addresses[WORLD_MAX_RANKS * WORLD_ADDRESS_BYTES];
  uint64_t each = mlxdist_group_address_size(simulation->ranks[0].group);
  REQUIRE(each <= WORLD_ADDRESS_BYTES);
  for (int rank = 0; rank < simulation->size; rank++)
    REQUIRE(mlxdist_group_address(simulation->ranks[rank].group, addresses + each * (uint64_t)rank) == MLXDIST_OK);
  for (int rank = 0; rank < simulation->size; rank++) {
    mlxdist_group *group = simulation->ranks[rank].group;
    REQUIRE(mlxdist_group_connect(group, addresses, each * (uint64_t)simulation->size) == MLXDIST_OK);
    progress_stop(group->engine);
  }
  /* Not by the cores of this machine: the choice of an algorithm depends on it. */
  bool crowded = simulation_draw(simulation, 2);
  for (int rank = 0; rank < simulation->size; rank++) simulation->ranks[rank].group->engine->crowded = crowded;
}

void simulation_open(struct simulation *simulation, int32_t size, const mlxdist_options *options, bool side_channel,
                     uint64_t seed) {
  *simulation = (struct simulation){.size = size, .now_ns = SECOND, .generator = seed};
  simulated_clock_set(simulation->now_ns);
  for (int rank = 0; rank < size; rank++) {
    struct simulated_rank *each = &simulation->ranks[rank];
    *each = (struct simulated_rank){.simulation = simulation, .rank = rank};
    REQUIRE(mlxdist_group_create(rank, size, options, &each->group) == MLXDIST_OK);
  }
  connect_all(simulation);
  for (int rank = 0; rank < size && side_channel; rank++)
    mlxdist_group_set_side_channel(simulation->ranks[rank].group, send_aside, &simulation->ranks[rank]);
}

void simulation_close(struct simulation *simulation) {
  for (int rank = 0; rank < simulation->size; rank++) mlxdist_group_destroy(simulation->ranks[rank].group);
}

/* What has arrived for `rank` by the side channel. */
static void deliver(struct simulation *simulation, int32_t rank) {
  for (int i = 0; i < simulation->message_count;) {
    struct simulated_message message = simulation->messages[i];
    if (message.to != rank || message.arrives_ns > simulation->now_ns) {
      i++;
      continue;
    }
    memmove(&simulation->messages[i], &simulation->messages[i + 1],
            (size_t)(--simulation->message_count - i) * sizeof message);
    mlxdist_group_side_channel_receive(simulation->ranks[rank].group, message.from, message.bytes, message.length);
  }
}

/* As the progress thread has it. */
static bool progress(struct simulated_rank *rank) {
  struct engine *engine = rank->group->engine;
  bool progressed = false;
  engine_lock(engine);
  engine_progress(engine, &progressed);
  engine_check_timers(engine, rank->simulation->now_ns);
  engine_unlock(engine);
  if (engine->side_channel) side_channel_send_reconnects(engine);
  return progressed;
}

void simulation_turn(struct simulation *simulation) {
  struct simulated_rank *rank = &simulation->ranks[simulation_draw(simulation, (uint64_t)simulation->size)];
  simulation->turns++;
  bool idle = simulation->idle_turns++ > 4 * (uint32_t)simulation->size;
  simulation->now_ns += 1 + simulation_draw(simulation, idle ? IDLE_NS : TURN_NS);
  simulated_clock_set(simulation->now_ns);
  if (rank->sleeps_until_ns > simulation->now_ns) return;
  deliver(simulation, rank->rank);
  if (progress(rank)) simulation->idle_turns = 0;
}

void simulation_run(struct simulation *simulation, uint64_t ns) {
  for (uint64_t end = simulation->now_ns + ns; simulation->now_ns < end;) simulation_turn(simulation);
}

int simulation_run_operation(struct simulation *simulation, struct simulated_step step, uint64_t limit_ns) {
  struct simulated_operation operations[WORLD_MAX_RANKS];
  int status = MLXDIST_OK, ended = 0;
  for (int rank = 0; rank < simulation->size; rank++)
    simulated_start(&operations[rank], simulation->ranks[rank].group, step);
  for (uint64_t end = simulation->now_ns + limit_ns; ended < simulation->size;) {
    REQUIRE(simulation->now_ns < end);
    simulation_turn(simulation);
    while (ended < simulation->size && simulated_has_ended(&operations[ended])) ended++;
  }
  for (int rank = 0; rank < simulation->size; rank++) {
    int own = simulated_end(&operations[rank]);
    REQUIRE(rank == 0 || own == status);
    status = own;
  }
  return status;
}

int simulation_sum(struct simulation *simulation, uint64_t count) {
  return simulation_run_operation(simulation, (struct simulated_step){.kind = SIMULATED_SUM, .count = count},
                                  100 * SECOND);
}

mlxdist_stats simulation_stats(const struct simulation *simulation, int32_t rank) {
  mlxdist_stats stats;
  mlxdist_group_stats(simulation->ranks[rank].group, &stats);
  return stats;
}

void simulation_inject(const struct simulation *simulation, int32_t rank, const char *faults) {
  for (int32_t each = 0; each < simulation->size; each++)
    if (rank == each || rank < 0)
      REQUIRE(mlxdist_group_inject_faults(simulation->ranks[each].group, faults) == MLXDIST_OK);
}
