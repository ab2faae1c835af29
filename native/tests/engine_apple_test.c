/* The engine on the devices that the profile apple-tb5 plays: one end of a cable each, few objects, whole frames, a
 * strict order of making and of giving back. What it does wrong is refused, so what works here keeps to the rules. */
#include "engine.h"
#include "group.h"
#include "sums.h"

static mlxdist_options options_of(const char *profile, uint32_t cables) {
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.soft_profile = profile;
  options.links_per_peer = cables;
  return options;
}

static void sums(mlxdist_group *group, int rank, int size) {
  static const uint64_t counts[] = {1, 992, 993, 3969, 40000, 300001};
  for (int i = 0; i < 6; i++) REQUIRE(all_sum(group, rank, size, counts[i]) == MLXDIST_OK);
}

/* Each peer has devices of its own. */
static void check_devices(const struct engine *engine, uint32_t cables) {
  REQUIRE(engine->transport.device_count == cables * (uint32_t)(engine->size - 1));
  for (uint32_t i = 0; i < engine->transport.device_count; i++) {
    REQUIRE(engine->transport.devices[i].queue_pairs == 2 && engine->transport.devices[i].regions == 1);
    for (uint32_t j = 0; j < i; j++)
      REQUIRE(strcmp(engine->transport.devices[i].name, engine->transport.devices[j].name) != 0);
  }
}

/* Twice, since what the first engine did not give back the second one would miss: a device is opened once. */
static void all_together(struct world *world, int rank, int size, const char *profile, uint32_t cables) {
  int barriers = 0;
  mlxdist_options options = options_of(profile, cables);
  for (int i = 0; i < 2; i++) {
    mlxdist_group *group = world_join(world, rank, &barriers, &options);
    sums(group, rank, size);
    check_devices(group->engine, cables);
    mlxdist_stats stats;
    mlxdist_group_stats(group, &stats);
    REQUIRE(stats.padding_bytes_sent > 0 && stats.provider_dropped == 0 && stats.reconnections == 0);
    world_leave(world, group, &barriers);
  }
}

static void one_cable(struct world *world, int rank, int size) { all_together(world, rank, size, "apple-tb5", 1); }
static void two_cables(struct world *world, int rank, int size) { all_together(world, rank, size, "apple-tb5", 2); }
static void four_cables(struct world *world, int rank, int size) { all_together(world, rank, size, "apple-tb5", 4); }
static void packets_by_four(struct world *world, int rank, int size) {
  all_together(world, rank, size, "apple-tb5-27", 4);
}
static void one_frame(struct world *world, int rank, int size) { all_together(world, rank, size, "apple-tb5-26.2", 1); }

static void packets(struct world *world, int rank, int size) { all_together(world, rank, size, "apple-tb5-27", 1); }

/* It refuses what the other profile takes: access flags and path MTU are found by trying. */
static void other_answers(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_options options = options_of("apple-tb5-26.2", 1);
  mlxdist_group *group = world_join(world, rank, &barriers, &options);
  REQUIRE(group->engine->transport.devices[0].region_access & IBV_ACCESS_REMOTE_WRITE);
  const struct channel *channel = &group->engine->peers[!rank].endpoint.channels[WIRE_BULK];
  struct ibv_qp_attr attr;
  struct ibv_qp_init_attr init;
  REQUIRE(channel->device->verbs->query_qp(channel->qp, &attr, IBV_QP_PATH_MTU, &init) == 0);
  REQUIRE(attr.path_mtu == IBV_MTU_1024 && channel->device->port.active_mtu == IBV_MTU_4096);
  sums(group, rank, size);
  world_leave(world, group, &barriers);
}

/* Where messages have one frame, there are as many bytes of slots as elsewhere. */
static void slots_of_one_frame(struct world *world, int rank, int size) {
  (void)world;
  mlxdist_options options = options_of("apple-tb5-26.2", 1);
  mlxdist_group *group;
  REQUIRE(mlxdist_group_create(rank, size, &options, &group) == MLXDIST_OK);
  REQUIRE(group->engine->options.bulk_slot_bytes == 4096 && group->engine->options.bulk_slots == 6 * 32);
  mlxdist_group_destroy(group);
  options.bulk_slots = 64;
  REQUIRE(mlxdist_group_create(rank, size, &options, &group) == MLXDIST_INVALID_ARGUMENT);
  REQUIRE(strstr(mlxdist_last_error(), "2048 bulk slots of 4096 bytes need 4096 frames in a queue"));
}

/* What was found with a peer counts, whatever a port says: less than that or, by the rule for its version, more. */
static void slots_that_were_found(struct world *world, int rank, int size) {
  static const struct {
    const char *profile;
    uint32_t found, bytes, slots;
  } cases[] = {{"apple-tb5", 16384, 16384, 6 * 8},
               {"apple-tb5", MLXDIST_PEER_PROBE_BYTES, 128 << 10, 6},
               {"apple-tb5-26.2", MLXDIST_PEER_PROBE_BYTES, 128 << 10, 6},
               {"ideal", 4096, 4096, 6 * 32}};
  (void)world;
  for (int i = 0; i < 4; i++) {
    mlxdist_options options = options_of(cases[i].profile, 1);
    options.largest_message = cases[i].found;
    mlxdist_group *group;
    REQUIRE(mlxdist_group_create(rank, size, &options, &group) == MLXDIST_OK);
    REQUIRE(group->engine->options.bulk_slot_bytes == cases[i].bytes);
    REQUIRE(group->engine->options.bulk_slots == cases[i].slots);
    mlxdist_group_destroy(group);
  }
}

/* Two hosts with different versions of macOS. */
static void versions_differ(struct world *world, int rank, int size) {
  int barriers = 0;
  mlxdist_options options = options_of(rank ? "apple-tb5" : "apple-tb5-26.2", 1);
  mlxdist_group *group;
  REQUIRE(mlxdist_group_create(rank, size, &options, &group) == MLXDIST_OK);
  uint64_t each = mlxdist_group_address_size(group);
  REQUIRE(mlxdist_group_address(group, world->addresses + each * (uint64_t)rank) == MLXDIST_OK);
  world_barrier(world, &barriers);
  REQUIRE(mlxdist_group_connect(group, world->addresses, each * (uint64_t)size) == MLXDIST_MISMATCH);
  REQUIRE(strstr(mlxdist_last_error(), "slots of 4096 bytes where one of them has macOS 26.2"));
  world_barrier(world, &barriers);
  mlxdist_group_destroy(group);
}

int main(void) {
  REQUIRE(mlxdist_debug_open("off", -1, 0) == MLXDIST_OK);
  int failed = 0;
  for (int size = 2; size <= 4; size++) failed |= world_run(size, one_cable);
  failed |= world_run(8, one_cable);
  failed |= world_run(3, two_cables);
  failed |= world_run(3, four_cables);
  failed |= world_run(2, packets_by_four);
  failed |= world_run(2, one_frame);
  failed |= world_run(3, one_frame);
  failed |= world_run(2, packets);
  failed |= world_run(3, packets);
  failed |= world_run(2, other_answers);
  failed |= world_run(2, slots_of_one_frame);
  failed |= world_run(2, slots_that_were_found);
  failed |= world_run(2, versions_differ);
  if (!failed) printf("engine_apple_test passed\n");
  return failed;
}
