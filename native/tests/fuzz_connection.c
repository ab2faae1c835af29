/*
 * Fuzzes what a rank does with the addresses of its peers, those of a probe too, and with messages of the side channel:
 * garbled ones are an error, and nothing in them is used before it has been checked.
 *
 * An input begins with a byte that says what is fuzzed; then come changes to what a real peer has said: place (two
 * bytes) and value (one byte).
 */
#include "pair.h"

#define MOST_BYTES 1024

/* What was sent through the side channel, for the other rank. */
struct mail {
  char bytes[8][MOST_BYTES];
  uint64_t lengths[8];
  int count;
};

static void post(void *context, int32_t to, const void *bytes, uint64_t length) {
  struct mail *mail = context;
  (void)to;
  REQUIRE(length <= MOST_BYTES);
  if (mail->count == 8) return;
  memcpy(mail->bytes[mail->count], bytes, length);
  mail->lengths[mail->count++] = length;
}

static void change(char *to, uint64_t room, const uint8_t **bytes, size_t *left, int most) {
  for (; *left >= 3 && most > 0; *bytes += 3, *left -= 3, most--)
    to[((*bytes)[0] | (*bytes)[1] << 8) % room] = (char)(*bytes)[2];
}

static void fuzz_addresses(const uint8_t *bytes, size_t left) {
  char addresses[2 * WORLD_ADDRESS_BYTES];
  struct pair pair;
  pair_create(&pair, 0);
  uint64_t total = pair_addresses(&pair, addresses, sizeof addresses);
  change(addresses, total, &bytes, &left, 1000);
  if (mlxdist_group_connect(pair.group[0], addresses, total - left % 3)) REQUIRE(mlxdist_last_error()[0]);
  pair_close(&pair);
}

static void fuzz_probe(const uint8_t *bytes, size_t left) {
  char addresses[2 * WORLD_ADDRESS_BYTES];
  mlxdist_link links[2 * MLXDIST_MAX_LINKS] = {{0}};
  mlxdist_peer_finding findings[2 * MLXDIST_MAX_LINKS];
  mlxdist_peer_probe *probes[2];
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.links = links;
  for (int rank = 0; rank < 2; rank++) {
    memset(links, 0, sizeof links);
    links[(ptrdiff_t)!rank * MLXDIST_MAX_LINKS] =
        (mlxdist_link){.provider = "soft", .device = "soft0", .gid_index = -1};
    REQUIRE(mlxdist_peer_probe_open(rank, 2, &options, &probes[rank]) == MLXDIST_OK);
  }
  uint64_t each = mlxdist_peer_probe_address_size(probes[0]);
  REQUIRE(2 * each <= sizeof addresses);
  for (int rank = 0; rank < 2; rank++)
    REQUIRE(mlxdist_peer_probe_prepare(probes[rank], 4096, addresses + each * (uint64_t)rank) == MLXDIST_OK);
  change(addresses, 2 * each, &bytes, &left, 1000);
  if (mlxdist_peer_probe_connect(probes[0], addresses, 2 * each - left % 3)) REQUIRE(mlxdist_last_error()[0]);
  mlxdist_peer_probe_send(probes[0]);
  mlxdist_peer_probe_receive(probes[0], findings);
  REQUIRE(!findings[MLXDIST_MAX_LINKS].arrives); /* the peer sends nothing */
  for (int rank = 0; rank < 2; rank++) mlxdist_peer_probe_close(probes[rank]);
}

/* Rank 1 wants to send something, which makes it say how it is reached; rank 0 hears something else, again and again.
 */
static void fuzz_messages(const uint8_t *bytes, size_t left) {
  struct mail mail[2] = {0};
  struct pair pair;
  mlxdist_options options;
  mlxdist_default_options(&options);
  options.on_demand_threshold = 1;
  options.timeout = options.entry_timeout = 1e-9;
  pair_open(&pair, &options);
  for (int rank = 0; rank < 2; rank++) mlxdist_group_set_side_channel(pair.group[rank], post, &mail[rank]);
  char value = 1;
  mlxdist_layout layout = {.dtype = MLXDIST_INT8};
  REQUIRE(mlxdist_send(pair.group[1], &value, &layout, 0, 0) == MLXDIST_TIMEOUT);
  REQUIRE(mail[1].count == 1);
  for (int i = 0; i < 4; i++) {
    char message[MOST_BYTES];
    uint64_t length = mail[1].lengths[0];
    memcpy(message, mail[1].bytes[0], length);
    int changes = left ? *bytes % 16 : 0;
    change(message, length, &bytes, &left, changes);
    if (mlxdist_group_side_channel_receive(pair.group[0], 1, message, length)) REQUIRE(mlxdist_last_error()[0]);
  }
  for (int i = 0; i < mail[0].count; i++)
    (void)mlxdist_group_side_channel_receive(pair.group[1], 0, mail[0].bytes[i], mail[0].lengths[i]);
  for (int rank = 0; rank < 2; rank++) pair_turn(&pair, rank);
  pair_close(&pair);
}

static void fuzz_raw(const uint8_t *bytes, size_t left) {
  struct pair pair;
  pair_open(&pair, 0);
  int32_t from = left ? (int32_t)(int8_t)bytes[0] : 0;
  if (mlxdist_group_side_channel_receive(pair.group[0], from, bytes, left)) REQUIRE(mlxdist_last_error()[0]);
  pair_close(&pair);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size) {
  static void (*const targets[])(const uint8_t *, size_t) = {fuzz_addresses, fuzz_messages, fuzz_raw, fuzz_probe};
  if (size == 0) return 0;
  targets[bytes[0] % 4](bytes + 1, size - 1);
  return 0;
}
