/* The engine on devices that answer awkwardly, as Thunderbolt's may: each answer of the profile apple-odd
 * alone, then all of them. */
#include "../providers/soft/queue_pair.h"
#include "../providers/soft/soft.h"
#include "engine.h"
#include "explain.h"
#include "group.h"
#include "sums.h"

#include <errno.h>

#define WIDE (IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE)

static struct soft_profile profile; /* that the devices play */

static mlxdist_options options_of(const char *name) {
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.soft_profile = name;
  return options;
}

/* Devices are opened first and change their profile before anything is created there. */
static mlxdist_group *open_devices(int rank, int size) {
  mlxdist_options options = options_of("apple-tb5");
  options.on_demand_threshold = 1;
  mlxdist_group *group;
  REQUIRE(mlxdist_group_create(rank, size, &options, &group) == MLXDIST_OK);
  for (uint32_t i = 0; i < group->engine->transport.device_count; i++)
    soft_context(group->engine->transport.devices[i].context)->profile = &profile;
  group->engine->options.on_demand_threshold = (uint32_t)size;
  return group;
}

static int create_peers(mlxdist_group *group) {
  int status = MLXDIST_OK;
  for (int32_t rank = 0; rank < group->size && !status; rank++)
    if (group->engine->peers[rank].endpoint.link_count) status = endpoint_create(&group->engine->peers[rank].endpoint);
  return status;
}

/* From one message to more than a queue holds that nothing leaves: it has 1023 places. */
static void exchange(mlxdist_group *group, int rank, int size) {
  static const uint64_t counts[] = {1, 993, 40000, 300001};
  for (int i = 0; i < 4; i++) REQUIRE(all_sum(group, rank, size, counts[i]) == MLXDIST_OK);
  for (int i = 0; i < 1200; i++) REQUIRE(all_sum(group, rank, size, 8) == MLXDIST_OK);
}

static void works(struct world *world, int rank, int size, int region_access, int queue_pair_access) {
  int barriers = 0;
  mlxdist_group *group = open_devices(rank, size);
  REQUIRE(create_peers(group) == MLXDIST_OK);
  for (uint32_t i = 0; i < group->engine->transport.device_count; i++) {
    REQUIRE(group->engine->transport.devices[i].region_access == region_access);
    REQUIRE(group->engine->transport.devices[i].queue_pair_access == queue_pair_access);
  }
  world_connect(world, group, rank, &barriers);
  exchange(group, rank, size);
  mlxdist_stats stats;
  mlxdist_group_stats(group, &stats);
  REQUIRE(stats.damaged == 0 && stats.reconnections == 0);
  world_leave(world, group, &barriers);
}

static const struct soft_profile *like_apple(void) { return &soft_profiles[SOFT_APPLE_TB5]; }

static void as_expected(struct world *world, int rank, int size) { works(world, rank, size, WIDE, WIDE); }
static void narrow_regions(struct world *world, int rank, int size) {
  works(world, rank, size, IBV_ACCESS_LOCAL_WRITE, WIDE);
}
static void narrow_queue_pairs(struct world *world, int rank, int size) {
  works(world, rank, size, WIDE, IBV_ACCESS_LOCAL_WRITE);
}

/* Whatever a device says to flags that it does not take, those that it takes are found. */
static int test_access(void) {
  static const int errors[] = {0, EINVAL, ENOTSUP, EOPNOTSUPP, EPERM, EACCES, EIO};
  int failed = 0;
  for (size_t i = 0; i < sizeof errors / sizeof *errors; i++) {
    profile = *like_apple();
    profile.access_error = errors[i];
    profile.region_access = WIDE;
    failed |= world_run(2, as_expected);
    profile.region_access = IBV_ACCESS_LOCAL_WRITE;
    failed |= world_run(2, narrow_regions);
    profile.region_access = 0;
    profile.queue_pair_access = WIDE;
    failed |= world_run(2, as_expected);
    profile.queue_pair_access = IBV_ACCESS_LOCAL_WRITE;
    failed |= world_run(2, narrow_queue_pairs);
  }
  return failed;
}

/* What was tried, and what came of it; errno 0 is no reason. */
static void no_access(struct world *world, int rank, int size) {
  (void)world;
  mlxdist_group *group = open_devices(rank, size);
  const char *verb = profile.region_access ? "reg_mr" : "modify_qp to INIT", *text = mlxdist_last_error();
  REQUIRE(create_peers(group) == MLXDIST_RESOURCES);
  REQUIRE(strstr(text, verb) && strstr(text, "failed with access flags 0x7 and 0x1; with 0x1: ") &&
          strstr(text, "; with 0x7: ") && !strstr(text, strerror(0)));
  if (verb[0] == 'r')
    REQUIRE(strstr(text, "the provider gives no reason"));
  else
    REQUIRE(strstr(text, strerror(ENOTSUP)));
  mlxdist_group_destroy(group);
}

static int test_no_access(void) {
  profile = *like_apple();
  profile.region_access = IBV_ACCESS_REMOTE_READ;
  int failed = world_run(2, no_access);
  profile.region_access = 0;
  profile.queue_pair_access = IBV_ACCESS_REMOTE_READ;
  return failed | world_run(2, no_access);
}

static int test_each_alone(void) {
  profile = *like_apple();
  profile.no_length = true;
  int failed = world_run(2, as_expected);
  profile = *like_apple();
  profile.no_depth = true;
  failed |= world_run(2, as_expected);
  profile = *like_apple();
  profile.signaled_only = true;
  return failed | world_run(2, as_expected);
}

/* A device that says in INIT how deep its queues are, and not before. */
static uint32_t depth;

static int query_late(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init) {
  if (qp->state == IBV_QPS_RESET) return EINVAL;
  int error = soft_query_qp(qp, attr, mask, init);
  attr->cap.max_send_wr = depth;
  return error;
}

static void late_depth(struct world *world, int rank, int size) {
  (void)world;
  mlxdist_group *group = open_devices(rank, size);
  struct device *device = group->engine->peers[!rank].endpoint.links[0].device;
  struct verbs table = *device->verbs;
  table.query_qp = query_late;
  device->verbs = &table;
  if (depth >= 2 * 32) {
    REQUIRE(create_peers(group) == MLXDIST_OK);
  } else {
    REQUIRE(create_peers(group) == MLXDIST_RESOURCES);
    REQUIRE(strstr(mlxdist_last_error(), "made queues of 63 and 1023 for the eager queue pair"));
  }
  mlxdist_group_destroy(group);
}

static int test_late_depth(void) {
  profile = *like_apple();
  depth = 1023;
  int failed = world_run(2, late_depth);
  depth = 63;
  return failed | world_run(2, late_depth);
}

/* A device that has queue pairs, or regions, for a part of what two ranks need. Nothing stays of that part. */
static struct counting {
  struct verbs table;
  const struct verbs *real;
  int queue_pairs, memories, regions, most_queue_pairs, most_regions;
} counting[WORLD_MAX_RANKS];
static _Thread_local struct counting *own; /* of the thread that creates all */

static struct ibv_qp *create_some(struct ibv_pd *pd, struct ibv_qp_init_attr *init) {
  errno = EBUSY;
  struct ibv_qp *qp = own->queue_pairs < own->most_queue_pairs ? own->real->create_qp(pd, init) : 0;
  own->queue_pairs += qp != 0;
  return qp;
}

static int destroy_counted(struct ibv_qp *qp) {
  own->queue_pairs--;
  return own->real->destroy_qp(qp);
}

static struct ibv_mr *register_some(struct ibv_pd *pd, void *memory, size_t bytes, int access) {
  errno = ENOMEM;
  struct ibv_mr *mr = own->regions < own->most_regions ? own->real->reg_mr(pd, memory, bytes, access) : 0;
  own->regions += mr != 0;
  return mr;
}

static int deregister_counted(struct ibv_mr *mr) {
  own->regions--;
  return own->real->dereg_mr(mr);
}

static void *allocate_counted(struct ibv_context *context, size_t bytes) {
  own->memories++;
  return own->real->alloc_memory(context, bytes);
}

static void free_counted(struct ibv_context *context, void *memory, size_t bytes) {
  own->memories--;
  own->real->free_memory(context, memory, bytes);
}

/* The other rank, which has not begun, hears of it by a channel that this test has not. */
static void partly(struct world *world, int rank, int size, int most_queue_pairs, int most_regions) {
  int barriers = 0;
  struct world_side side;
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.on_demand_threshold = 1;
  options.timeout = options.entry_timeout = 1;
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  world_side_open(&side, world, group, rank);
  if (rank == 0) {
    struct device *device = &group->engine->transport.devices[0];
    own = &counting[rank];
    *own = (struct counting){*device->verbs, device->verbs, 0, 0, 0, most_queue_pairs, most_regions};
    own->table.create_qp = create_some;
    own->table.destroy_qp = destroy_counted;
    own->table.reg_mr = register_some;
    own->table.dereg_mr = deregister_counted;
    own->table.alloc_memory = allocate_counted;
    own->table.free_memory = free_counted;
    device->verbs = &own->table;
    int status = all_sum(group, rank, size, 10);
    REQUIRE(status == MLXDIST_TRANSPORT || status == MLXDIST_RESOURCES);
    REQUIRE(strstr(mlxdist_last_error(), most_queue_pairs < 2 ? "create_qp on the" : "reg_mr"));
    for (int i = 0; i < 3; i++) REQUIRE(all_sum(group, rank, size, 10) == status);
    REQUIRE(mlxdist_group_error(group) == status);
    REQUIRE(own->queue_pairs == 0 && own->memories == 0 && own->regions == 0);
    mlxdist_stats stats;
    mlxdist_group_stats(group, &stats);
    REQUIRE(stats.slab_bytes == 0 && stats.memory_registrations == 0);
  }
  world_barrier(world, &barriers);
  world_side_close(&side);
  mlxdist_group_destroy(group);
}

static void no_queue_pair(struct world *world, int rank, int size) { partly(world, rank, size, 0, 9); }
static void one_queue_pair(struct world *world, int rank, int size) { partly(world, rank, size, 1, 9); }
static void no_region(struct world *world, int rank, int size) { partly(world, rank, size, 9, 0); }

static void all_together(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_options options = options_of("apple-odd");
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  exchange(group, rank, size);
  world_leave(world, group, &barriers);
}

/* The port leaves the bridge, and the same queue pairs connect. */
static void bridged(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_options options = options_of("apple-odd");
  mlxdist_group *group;
  REQUIRE(mlxdist_group_create(rank, size, &options, &group) == MLXDIST_OK);
  REQUIRE(mlxdist_group_inject_faults(group, "bridge=on") == MLXDIST_OK);
  uint64_t each = mlxdist_group_address_size(group);
  REQUIRE(mlxdist_group_address(group, world->addresses + each * (uint64_t)rank) == MLXDIST_OK);
  world_barrier(world, &barriers);
  REQUIRE(mlxdist_group_connect(group, world->addresses, each * (uint64_t)size) == MLXDIST_TRANSPORT);
  REQUIRE(strstr(mlxdist_last_error(), verbs_port_remedy()));
  REQUIRE(mlxdist_group_inject_faults(group, "bridge=off") == MLXDIST_OK);
  world_barrier(world, &barriers);
  REQUIRE(mlxdist_group_connect(group, world->addresses, each * (uint64_t)size) == MLXDIST_OK);
  world_barrier(world, &barriers);
  exchange(group, rank, size);
  world_leave(world, group, &barriers);
}

int main(void) {
  REQUIRE(mlxdist_debug_open("off", -1, 0) == MLXDIST_OK);
  int failed = test_access() | test_no_access() | test_each_alone() | test_late_depth();
  for (int size = 2; size <= 4; size++) failed |= world_run(size, all_together);
  failed |= world_run(2, bridged);
  failed |= world_run(2, no_queue_pair);
  failed |= world_run(2, one_queue_pair);
  failed |= world_run(2, no_region);
  if (!failed) printf("engine_odd_test passed\n");
  return failed;
}
