/* Queue pairs that fail are re-created, on one side or on both, and operations go on as if nothing had happened. */
#include "engine.h"
#include "group.h"
#include "reconnect.h"
#include "sums.h"

#include <errno.h>

/* What a driver does when a work request fails: what is posted is flushed, with errors. Not again before the new one
 * has carried something: one that always fails is an error. */
static void break_queue_pair(mlxdist_group *group, int peer, int channel) {
  struct engine *engine = group->engine;
  engine_lock(engine);
  struct channel *broken = &engine->peers[peer].endpoint.channels[channel];
  struct ibv_qp_attr attr = {.qp_state = IBV_QPS_ERR};
  if (broken->open && broken->reconnects == 0)
    REQUIRE(broken->device->verbs->modify_qp(broken->qp, &attr, IBV_QP_STATE) == 0);
  engine_unlock(engine);
}

static void broken(struct world *world, int rank, int size, int by_all) {
  static const uint64_t counts[] = {1, 900, 40000, 300001};
  int barriers = 0;
  struct world_side side;
  mlxdist_group *group = world_join(world, rank, &barriers, 0);
  world_side_open(&side, world, group, rank);
  for (int i = 0; i < 60; i++) {
    if (i % 3 == 0 && (by_all || rank == 0)) break_queue_pair(group, (rank + 1) % size, i / 3 % 2);
    REQUIRE(all_sum(group, rank, size, counts[i % 4]) == MLXDIST_OK);
  }
  mlxdist_stats stats;
  mlxdist_group_stats(group, &stats);
  if (by_all || rank == 0) REQUIRE(stats.reconnections > 0);
  world_side_leave(&side, &barriers);
}

static void by_one(struct world *world, int rank, int size) { broken(world, rank, size, 0); }
static void by_all(struct world *world, int rank, int size) { broken(world, rank, size, 1); }

/* Another thread breaks them while messages are on their way. */
struct breaker {
  mlxdist_group *group;
  int rank, size;
  _Atomic int ends;
};

static void *break_often(void *context) {
  struct breaker *breaker = context;
  for (int i = 0; !breaker->ends; i++) {
    break_queue_pair(breaker->group, (breaker->rank + 1 + i % (breaker->size - 1)) % breaker->size, i % 2);
    usleep(30000);
  }
  return 0;
}

static void meanwhile(struct world *world, int rank, int size) {
  int barriers = 0;
  struct world_side side;
  mlxdist_group *group = world_join(world, rank, &barriers, 0);
  world_side_open(&side, world, group, rank);
  struct breaker breaker = {.group = group, .rank = rank, .size = size};
  pthread_t thread;
  REQUIRE(pthread_create(&thread, 0, break_often, &breaker) == 0);
  for (int i = 0; i < 30; i++) {
    REQUIRE(all_sum(group, rank, size, 1000003) == MLXDIST_OK);
    REQUIRE(all_sum(group, rank, size, 10) == MLXDIST_OK);
  }
  breaker.ends = 1;
  pthread_join(thread, 0);
  world_side_leave(&side, &barriers);
}

/* Where nothing but the queue pair joins the ranks, it fails as it did. */
static void without_side_channel(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.timeout = options.entry_timeout = 1;
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  break_queue_pair(group, !rank, 0);
  REQUIRE(all_sum(group, rank, size, 10) == MLXDIST_TRANSPORT);
  REQUIRE(strstr(mlxdist_last_error(), "completed with WR_FLUSH_ERR: the queue pair was in the error state"));
  world_barrier(world, &barriers);
  mlxdist_group_destroy(group);
}

/* A device that makes no queue pair more, or does not let go of one. */
static struct verbs refusing[WORLD_MAX_RANKS];

static struct ibv_qp *refuse_create(struct ibv_pd *pd, struct ibv_qp_init_attr *init) {
  (void)pd;
  (void)init;
  errno = EBUSY;
  return 0;
}

static int (*_Atomic destroy_qp)(struct ibv_qp *qp); /* ranks are threads */

/* It does so all the same: what a device keeps would count as memory of this process that leaks. */
static int refuse_destroy(struct ibv_qp *qp) {
  destroy_qp(qp);
  return EBUSY;
}

static void refuse(mlxdist_group *group, const char *verb) {
  struct engine *engine = group->engine;
  engine_lock(engine);
  struct device *device = &engine->transport.devices[0];
  struct verbs *table = &refusing[engine->rank];
  *table = *device->verbs;
  destroy_qp = device->verbs->destroy_qp;
  if (strcmp(verb, "create_qp") == 0)
    table->create_qp = refuse_create;
  else
    table->destroy_qp = refuse_destroy;
  device->verbs = table;
  engine_unlock(engine);
}

/* Neither rank crashes on the queue pair that is missing. Where the eager one is left its peer hears of it at once. */
static void refused(struct world *world, int rank, int size, const char *verb, int channel, bool by_both) {
  int barriers = 0;
  struct world_side side;
  char failed[64];
  snprintf(failed, sizeof failed, "%s on the %s queue pair", verb, channel % 2 ? "bulk" : "eager");
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.timeout = options.entry_timeout = channel % 2 ? 30 : 1;
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  world_side_open(&side, world, group, rank);
  REQUIRE(all_sum(group, rank, size, 10) == MLXDIST_OK);
  world_barrier(world, &barriers);
  if (rank == 0 || by_both) {
    refuse(group, verb);
    break_queue_pair(group, !rank, channel);
  }
  int status = MLXDIST_OK;
  while (!status) status = all_sum(group, rank, size, 10);
  bool hears = rank == 0 || by_both || channel % 2;
  REQUIRE(status == (hears ? MLXDIST_TRANSPORT : MLXDIST_TIMEOUT));
  if (hears) REQUIRE(strstr(mlxdist_last_error(), failed));
  world_barrier(world, &barriers);
  usleep(100000); /* what the side channel's thread and the progress thread have to do with it */
  REQUIRE(mlxdist_group_error(group) == status);
  world_barrier(world, &barriers);
  world_side_close(&side);
  mlxdist_group_destroy(group);
}

static void no_eager(struct world *world, int rank, int size) { refused(world, rank, size, "create_qp", 0, false); }
static void no_bulk(struct world *world, int rank, int size) { refused(world, rank, size, "create_qp", 1, false); }
static void neither(struct world *world, int rank, int size) { refused(world, rank, size, "create_qp", 0, true); }
static void keeps_eager(struct world *world, int rank, int size) { refused(world, rank, size, "destroy_qp", 0, false); }
static void keeps_bulk(struct world *world, int rank, int size) { refused(world, rank, size, "destroy_qp", 1, false); }

/* The peer has begun to reconnect too, and its message comes to a rank that could not. */
static void peer_asks(struct world *world, int rank, int size) {
  int barriers = 0;
  struct world_side side;
  mlxdist_group *group = world_join(world, rank, &barriers, 0);
  world_side_open(&side, world, group, rank);
  REQUIRE(all_sum(group, rank, size, 10) == MLXDIST_OK);
  refuse(group, "create_qp");
  struct engine *engine = group->engine;
  struct endpoint *endpoint = &engine->peers[!rank].endpoint;
  struct reconnect_message message, reply;
  engine_lock(engine);
  REQUIRE(reconnect_begin(&endpoint->channels[1], IBV_WC_WR_FLUSH_ERR) == MLXDIST_TRANSPORT);
  REQUIRE(!reconnect_next(endpoint, &message));
  message = (struct reconnect_message){.step = 1, .channel = 1, .epoch = 1};
  REQUIRE(!reconnect_receive(endpoint, &message, &reply));
  engine_unlock(engine);
  world_barrier(world, &barriers);
  world_side_close(&side);
  mlxdist_group_destroy(group);
}

int main(void) {
  REQUIRE(mlxdist_debug_open("off", -1, 0) == MLXDIST_OK);
  int failed = 0;
  for (int size = 2; size <= 3; size++) {
    failed |= world_run(size, by_one);
    failed |= world_run(size, by_all);
    failed |= world_run(size, meanwhile);
  }
  failed |= world_run(2, without_side_channel);
  failed |= world_run(2, no_eager);
  failed |= world_run(2, no_bulk);
  failed |= world_run(2, neither);
  failed |= world_run(2, keeps_eager);
  failed |= world_run(2, keeps_bulk);
  failed |= world_run(2, peer_asks);
  if (!failed) printf("engine_reconnect_test passed\n");
  return failed;
}
