/* The probe of devices with a peer finds what each profile of the software provider enforces, no more where messages
 * are lost, and leaves nothing behind. All ranks are in one thread, on a simulated clock. */
#include "peer_probe.h"

#include "../providers/soft/soft.h"
#include "check.h"
#include "simulated_clock.h"

#include <dirent.h>
#include <errno.h>

#define RANKS 4
#define SIZES 5

static const uint32_t sizes[SIZES] = {MLXDIST_PEER_PROBE_BYTES, 65536, 16384, 8192, 4096};

struct probes {
  int ranks;
  uint32_t links;
  mlxdist_peer_probe *of[RANKS];
  mlxdist_peer_finding first[RANKS][RANKS * MLXDIST_MAX_LINKS], last[RANKS][RANKS * MLXDIST_MAX_LINKS];
  uint32_t largest; /* that arrived by all links, both ways */
  int rounds;
};

static mlxdist_options options_of(const char *profile) {
  return (mlxdist_options){.bulk_slot_bytes = 128 << 10, .bulk_slots = 6, .eager_slots = 32, .soft_profile = profile};
}

static const struct soft_profile *named(const char *profile) {
  for (int i = 0; i < SOFT_PROFILES; i++)
    if (strcmp(soft_profiles[i].name, profile) == 0) return &soft_profiles[i];
  CHECK(0, "%s", profile);
  return NULL;
}

/* A device for each cable, where a device is the end of one; else four for all peers. */
static int open_rank(struct probes *probes, const char *profile, int rank) {
  char names[RANKS * MLXDIST_MAX_LINKS][16];
  mlxdist_link links[RANKS * MLXDIST_MAX_LINKS] = {{0}};
  for (int peer = 0; peer < probes->ranks; peer++) {
    for (uint32_t i = 0; i < probes->links && peer != rank; i++) {
      uint32_t first = named(profile)->single_peer ? probes->links * (uint32_t)(peer - (peer > rank)) : 0;
      int at = peer * MLXDIST_MAX_LINKS + (int)i;
      snprintf(names[at], sizeof names[at], "soft%u", first + i);
      links[at] = (mlxdist_link){.provider = "soft", .device = names[at], .gid_index = -1};
    }
  }
  mlxdist_options options = options_of(profile);
  options.links = links;
  return mlxdist_peer_probe_open(rank, probes->ranks, &options, &probes->of[rank]);
}

static void open_all(struct probes *probes, const char *profile, int ranks, uint32_t links) {
  *probes = (struct probes){.ranks = ranks, .links = links};
  for (int rank = 0; rank < ranks; rank++)
    CHECK(open_rank(probes, profile, rank) == MLXDIST_OK, "%s", mlxdist_last_error());
}

static void close_all(struct probes *probes) {
  for (int rank = 0; rank < probes->ranks; rank++) mlxdist_peer_probe_close(probes->of[rank]);
}

static bool all_arrive(const struct probes *probes) {
  for (int rank = 0; rank < probes->ranks; rank++)
    for (int peer = 0; peer < probes->ranks; peer++)
      for (uint32_t i = 0; i < probes->links && peer != rank; i++)
        if (!probes->last[rank][peer * MLXDIST_MAX_LINKS + (int)i].arrives) return false;
  return true;
}

static void connect_all(const struct probes *probes, uint32_t bytes) {
  char addresses[RANKS * RANKS * sizeof(struct endpoint_address)];
  uint64_t each = mlxdist_peer_probe_address_size(probes->of[0]);
  CHECK_EQUAL(each, (uint64_t)probes->ranks * sizeof(struct endpoint_address));
  for (int rank = 0; rank < probes->ranks; rank++) {
    int status = mlxdist_peer_probe_prepare(probes->of[rank], bytes, addresses + each * (uint64_t)rank);
    CHECK(status == MLXDIST_OK, "%s", mlxdist_last_error());
  }
  for (int rank = 0; rank < probes->ranks; rank++) {
    int status = mlxdist_peer_probe_connect(probes->of[rank], addresses, each * (uint64_t)probes->ranks);
    CHECK(status == MLXDIST_OK, "%s", mlxdist_last_error());
  }
}

static void one_round(struct probes *probes, uint32_t bytes) {
  connect_all(probes, bytes);
  for (int rank = 0; rank < probes->ranks; rank++) mlxdist_peer_probe_send(probes->of[rank]);
  for (int rank = 0; rank < probes->ranks; rank++)
    mlxdist_peer_probe_receive(probes->of[rank], probes->rounds ? probes->last[rank] : probes->first[rank]);
  if (!probes->rounds++) memcpy(probes->last, probes->first, sizeof probes->last);
}

/* As the ranks of a job do. */
static void probe(struct probes *probes) {
  for (int i = 0; i < SIZES && !probes->largest; i++) {
    one_round(probes, sizes[i]);
    if (all_arrive(probes)) probes->largest = sizes[i];
  }
}

static uint32_t largest_of(const struct soft_profile *profile) {
  for (int i = 0; i < SIZES; i++)
    if (sizes[i] <= soft_max_receive(profile)) return sizes[i];
  CHECK(0, "%s", profile->name);
  return 0;
}

static void check_end(const struct soft_profile *profile, const mlxdist_peer_finding *first,
                      const mlxdist_peer_finding *last) {
  bool large = largest_of(profile) == MLXDIST_PEER_PROBE_BYTES;
  CHECK_EQUAL(first->empty, !profile->packets);
  CHECK_EQUAL(last->lengths, !profile->no_length);
  CHECK_EQUAL(last->packets, profile->packets);
  CHECK(large || *first->failed, "%s", profile->name);
  if (profile->packets) CHECK(strcmp(first->failed, "LOC_LEN_ERR") == 0, "%s", first->failed);
  if (!profile->packets && !large) CHECK(strcmp(last->longer, "post_send: Invalid argument") == 0, "%s", last->longer);
  CHECK_EQUAL(last->receives, large ? 6 : 6 * 32);
}

static void check_profile(const struct soft_profile *profile, int ranks, uint32_t links) {
  struct probes probes;
  open_all(&probes, profile->name, ranks, links);
  uint64_t begun = simulated_clock_now();
  probe(&probes);
  CHECK_EQUAL(probes.largest, largest_of(profile));
  CHECK_EQUAL(probes.rounds, probes.largest == MLXDIST_PEER_PROBE_BYTES ? 1 : SIZES);
  for (int rank = 0; rank < ranks; rank++)
    for (int peer = 0; peer < ranks; peer++)
      for (uint32_t i = 0; i < links && peer != rank; i++) {
        int at = peer * MLXDIST_MAX_LINKS + (int)i;
        check_end(profile, &probes.first[rank][at], &probes.last[rank][at]);
      }
  CHECK(simulated_clock_now() - begun < 50000000 * (uint64_t)ranks, "one thread has the time of all ranks");
  close_all(&probes);
}

/* Twice: what the first one did not give back, the second would miss. */
static void test_profiles(void) {
  for (int i = 0; i < SOFT_PROFILES; i++)
    for (int ranks = 2; ranks <= RANKS; ranks++)
      for (uint32_t links = 1; links <= MLXDIST_MAX_LINKS; links++)
        for (int times = 0; times < 2; times++) check_profile(&soft_profiles[i], ranks, links);
}

static int open_files(void) {
  int count = 0;
  DIR *directory = opendir("/dev/fd");
  while (readdir(directory)) count++;
  closedir(directory);
  return count;
}

static void test_nothing_is_left(void) {
  check_profile(&soft_profiles[SOFT_APPLE_TB5_27], 3, 2);
  int before = open_files();
  check_profile(&soft_profiles[SOFT_APPLE_TB5_27], 3, 2);
  CHECK_EQUAL(open_files(), before);
}

/* On macOS 27 a device has three queue pairs: no more than two are there at one time. A job's messages are counted. */
static void test_objects_and_messages(void) {
  struct probes probes;
  open_all(&probes, "apple-tb5", 2, 1);
  probe(&probes);
  struct device *device = probes.of[0]->transport.devices;
  CHECK_EQUAL(device->queue_pairs, 2);
  CHECK_EQUAL(device->regions, 1);
  CHECK_EQUAL(soft_context(device->context)->counters.sends, 9);
  close_all(&probes);
}

static void inject(const struct probes *probes, int rank, const char *faults) {
  const struct transport *transport = &probes->of[rank]->transport;
  for (uint32_t i = 0; i < transport->device_count; i++)
    CHECK_EQUAL(transport->devices[i].verbs->inject(transport->devices[i].context, faults), 0);
}

/* By seeds: a size that does not work is never found, whatever is lost, late, cut or repeated; and what is lost now and
 * then, as on a wire, does not make messages smaller. */
static void check_faults(const char *profile, const char *faults, int *as_large, int *smaller) {
  for (int seed = 1; seed <= 12; seed++) {
    char text[128];
    struct probes probes;
    open_all(&probes, profile, 2 + seed % 2, 1 + (uint32_t)seed % 2);
    for (int rank = 0; rank < probes.ranks; rank++) {
      snprintf(text, sizeof text, "seed=%d,%s", seed * RANKS + rank, faults);
      inject(&probes, rank, text);
    }
    probe(&probes);
    uint32_t most = largest_of(named(profile));
    CHECK(probes.largest <= most, "%s, %s: %u bytes", profile, text, probes.largest);
    for (int peer = 1; peer < probes.ranks; peer++) {
      const mlxdist_peer_finding *first = &probes.first[0][peer * MLXDIST_MAX_LINKS];
      CHECK(!first->empty || !named(profile)->packets, "%s, %s", profile, text);
      CHECK(first->lengths, "%s, %s", profile, text);
    }
    ++*(probes.largest == most ? as_large : smaller);
    close_all(&probes);
  }
}

static void test_faults(void) {
  static const char *const often[] = {"drop=1/2",   "truncate=1/3", "corrupt=1/4",
                                      "error=1/10", "lose=1/2",     "delay=20000"};
  static const char *const rare[] = {"drop=1/1000", "duplicate=1/4", "lose=1/280"};
  int as_large = 0, smaller = 0;
  for (int i = 0; i < 6; i++) {
    check_faults("apple-tb5", often[i], &as_large, &smaller);
    check_faults("apple-tb5-27", often[i], &as_large, &smaller);
  }
  CHECK(as_large > 0 && smaller > 0, "%d and %d", as_large, smaller);
  as_large = smaller = 0;
  for (int i = 0; i < 3; i++) check_faults("apple-tb5", rare[i], &as_large, &smaller);
  CHECK_EQUAL(smaller, 0);
}

/* A peer that sends nothing: ten milliseconds a size, and no size. */
static void test_silence(void) {
  struct probes probes;
  open_all(&probes, "apple-tb5", 2, 1);
  inject(&probes, 0, "link=down");
  one_round(&probes, sizes[0]);
  CHECK(probes.last[0][MLXDIST_MAX_LINKS].arrives && !probes.last[1][0].arrives);
  CHECK(strcmp(probes.last[1][0].failed, "nothing arrives") == 0, "%s", probes.last[1][0].failed);
  close_all(&probes);
}

/* A driver that has room for fewer receives of that size, as one was seen to: its 64th of 64 KiB is refused. */

static int (*post_recv)(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
static uint64_t room, used;

static int refuse(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
  bool is_large = wr->sg_list->length > 16384;
  used += is_large ? wr->sg_list->length : 0;
  return is_large && used > room ? ENOMEM : post_recv(qp, wr, bad);
}

static void test_receives_that_are_refused(void) {
  struct probes probes;
  open_all(&probes, "apple-tb5", 2, 1);
  struct ibv_context *context = probes.of[0]->transport.devices[0].context;
  post_recv = context->ops.post_recv;
  context->ops.post_recv = refuse;
  room = 3 * (uint64_t)sizes[0];
  one_round(&probes, sizes[0]);
  const mlxdist_peer_finding *found = &probes.last[0][MLXDIST_MAX_LINKS];
  CHECK(strcmp(found->failed, "post_recv fails after 3 receives") == 0, "%s", found->failed);
  CHECK(!found->arrives);
  used = room;
  probe(&probes);
  CHECK_EQUAL(probes.largest, 16384);
  close_all(&probes);
}

static void test_arguments(void) {
  struct probes probes;
  char address[2 * sizeof(struct endpoint_address)], addresses[2 * sizeof address];
  mlxdist_peer_probe *none;
  mlxdist_options options = options_of("ideal");
  CHECK_EQUAL(mlxdist_peer_probe_open(0, 2, &options, &none), MLXDIST_INVALID_ARGUMENT);
  CHECK(!none);
  open_all(&probes, "apple-tb5", 2, 2);
  static const uint32_t wrong[] = {0, 4095, 4096 * 33 + 1, 1 << 20};
  for (int i = 0; i < 4; i++)
    CHECK_EQUAL(mlxdist_peer_probe_prepare(probes.of[0], wrong[i], address), MLXDIST_INVALID_ARGUMENT);
  CHECK_EQUAL(mlxdist_peer_probe_prepare(probes.of[0], 4096, addresses), MLXDIST_OK);
  CHECK_EQUAL(mlxdist_peer_probe_prepare(probes.of[1], 4096, addresses + sizeof address), MLXDIST_OK);
  CHECK_EQUAL(mlxdist_peer_probe_connect(probes.of[0], addresses, sizeof addresses - 1), MLXDIST_INVALID_ARGUMENT);
  struct endpoint_address to_rank_0;
  memcpy(&to_rank_0, addresses + sizeof address, sizeof to_rank_0);
  to_rank_0.links = 1;
  memcpy(addresses + sizeof address, &to_rank_0, sizeof to_rank_0);
  CHECK_EQUAL(mlxdist_peer_probe_connect(probes.of[0], addresses, sizeof addresses), MLXDIST_MISMATCH);
  close_all(&probes);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Profiles", test_profiles},
      {"NothingIsLeft", test_nothing_is_left},
      {"ObjectsAndMessages", test_objects_and_messages},
      {"Faults", test_faults},
      {"Silence", test_silence},
      {"ReceivesThatAreRefused", test_receives_that_are_refused},
      {"Arguments", test_arguments},
  };
  CHECK_EQUAL(mlxdist_debug_open("off", -1, 0), MLXDIST_OK);
  simulated_clock_set_reading(20000); /* what a turn without progress takes */
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
