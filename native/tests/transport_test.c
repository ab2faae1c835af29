/* The transport alone, without an engine: messages of two endpoints arrive in order and once, whatever the device does
 * to them, and what happens is reported through the callbacks. */
#include "transport.h"

#include "acknowledgement.h"
#include "check.h"
#include "credit.h"
#include "error.h"
#include "failover.h"
#include "receive.h"
#include "reconnect.h"
#include "simulated_clock.h"
#include "steady_clock.h"

#include <stdio.h>

#define MESSAGES 500u

/* One rank of two, in one thread with the other. */
struct side {
  struct transport transport;
  struct transport_counters counters;
  mlxdist_options options;
  struct endpoint endpoints[2];
  struct endpoint *by_rank[2];
  uint32_t sent, received, acks, links_down;
  int error;
};

static struct side *side_of(const struct endpoint *endpoint) {
  return (struct side *)endpoint->transport; /* its first member */
}

static int on_message(struct endpoint *endpoint, struct recv_desc *message) {
  struct side *side = side_of(endpoint);
  uint32_t number;
  CHECK_EQUAL(recv_header(message)->length, sizeof number);
  memcpy(&number, recv_payload(message), sizeof number);
  CHECK_EQUAL(number, side->received++);
  return recv_release(message);
}

static int on_ack(struct endpoint *endpoint, const struct wire_header *header) {
  CHECK_EQUAL(header->cts, 4711);
  side_of(endpoint)->acks++;
  return MLXDIST_OK;
}

static void fill_ack(struct endpoint *endpoint, struct wire_header *header) {
  (void)endpoint;
  header->cts = 4711;
}

static void on_link_down(struct endpoint *endpoint) { side_of(endpoint)->links_down++; }
static void on_error(struct transport *transport, int status) { ((struct side *)transport)->error = status; }

static const struct transport_callbacks callbacks = {on_message, on_ack, fill_ack, on_link_down, on_error};

static void side_open(struct side *side, int32_t rank) {
  static const bool reachable[2] = {true, true};
  *side = (struct side){
      .options = {
          .bulk_slot_bytes = 8192, .bulk_slots = 4, .eager_slots = 8, .links_per_peer = 1, .soft_profile = "ideal"}};
  for (int i = 0; i < 2; i++) {
    side->by_rank[i] = &side->endpoints[i];
    side->endpoints[i] = (struct endpoint){.transport = &side->transport, .rank = i};
  }
  side->transport = (struct transport){.rank = rank,
                                       .size = 2,
                                       .host = "host",
                                       .options = &side->options,
                                       .counters = &side->counters,
                                       .callbacks = &callbacks,
                                       .endpoints = side->by_rank,
                                       .can_reconnect = true};
  CHECK(transport_open(&side->transport, 0, reachable) == MLXDIST_OK, "%s", mlxdist_last_error());
  CHECK_EQUAL(endpoint_create(&side->endpoints[!rank]), MLXDIST_OK);
}

static void open_pair(struct side sides[2]) {
  struct endpoint_address addresses[2];
  for (int rank = 0; rank < 2; rank++) side_open(&sides[rank], rank);
  for (int rank = 0; rank < 2; rank++) endpoint_address(&sides[rank].endpoints[!rank], &addresses[rank]);
  for (int rank = 0; rank < 2; rank++) {
    CHECK_EQUAL(endpoint_connect(&sides[rank].endpoints[!rank], &addresses[!rank]), MLXDIST_OK);
    sides[rank].endpoints[!rank].usable = true;
  }
}

static void close_pair(struct side sides[2]) {
  for (int rank = 0; rank < 2; rank++) transport_close(&sides[rank].transport);
}

static void send_next(struct side *side, struct channel *channel) {
  struct outgoing_message message = {.kind = WIRE_DATA, .payload = &side->sent, .length = sizeof side->sent};
  if (!channel_can_send(channel, WIRE_DATA)) return;
  CHECK_EQUAL(channel_send(channel, &message), MLXDIST_OK);
  side->sent++;
}

/* What the engine does with the side channel. */
static void send_reconnects(struct side sides[2], int from);

static void receive_reconnect(struct side sides[2], int rank, const struct reconnect_message *message) {
  struct reconnect_message reply;
  bool replies = reconnect_receive(&sides[rank].endpoints[!rank], message, &reply);
  send_reconnects(sides, rank);
  if (replies) receive_reconnect(sides, !rank, &reply);
}

static void send_reconnects(struct side sides[2], int from) {
  struct reconnect_message message;
  while (reconnect_next(&sides[from].endpoints[!from], &message)) receive_reconnect(sides, !from, &message);
}

static void turn(struct side *side) {
  bool progressed = false;
  transport_poll(&side->transport, &progressed);
  transport_flush(&side->transport, progressed);
  if (!progressed) transport_tick(&side->transport, clock_ns());
  CHECK(side->error == MLXDIST_OK, "%s", mlxdist_last_error());
}

/* Rank 0 sends; rank 1 only receives, so all it sends are acknowledgements. */
static void send_all(struct side sides[2], enum wire_channel kind) {
  struct channel *channel = &sides[0].endpoints[1].channels[kind];
  while (sides[1].received < MESSAGES) {
    if (sides[0].sent < MESSAGES) send_next(&sides[0], channel);
    for (int rank = 0; rank < 2; rank++) turn(&sides[rank]);
    for (int rank = 0; rank < 2; rank++) send_reconnects(sides, rank);
  }
  while (!transport_is_settled(&sides[0].transport) || !transport_is_settled(&sides[1].transport))
    for (int rank = 0; rank < 2; rank++) turn(&sides[rank]);
  CHECK_EQUAL(sides[1].received, MESSAGES);
}

static void inject(struct side *side, const char *faults) {
  struct device *device = side->transport.devices;
  CHECK_EQUAL(device->verbs->inject(device->context, faults), 0);
}

static void test_messages(void) {
  struct side sides[2];
  open_pair(sides);
  send_all(sides, WIRE_EAGER);
  CHECK_EQUAL(counted(&sides[0].counters.retransmissions), 0);
  CHECK(sides[0].acks > 0 && sides[0].acks < MESSAGES / 2, "%u acknowledgements", sides[0].acks);
  CHECK_EQUAL(counted(&sides[0].counters.control_messages_sent), 0);
  close_pair(sides);
}

static void test_faults(void) {
  static const char *const faults[] = {"seed=1,drop=1/20", "seed=2,duplicate=1/10", "seed=3,truncate=1/20"};
  for (int i = 0; i < 3; i++) {
    struct side sides[2];
    open_pair(sides);
    inject(&sides[0], faults[i]);
    send_all(sides, i % 2 ? WIRE_BULK : WIRE_EAGER);
    CHECK(counted(i == 1 ? &sides[1].counters.duplicates : &sides[0].counters.retransmissions) > 0);
    close_pair(sides);
  }
}

static void test_credit(void) {
  struct side sides[2];
  open_pair(sides);
  struct channel *channel = &sides[0].endpoints[1].channels[WIRE_EAGER];
  for (int i = 0; i < 20; i++) send_next(&sides[0], channel);
  CHECK_EQUAL(sides[0].sent, 8 - CHANNEL_CONTROL_SLOTS);
  CHECK(channel_can_send(channel, WIRE_ABORT));
  close_pair(sides);
}

static void test_reconnect(void) {
  struct side sides[2];
  open_pair(sides);
  inject(&sides[0], "error_next=1");
  send_all(sides, WIRE_EAGER);
  CHECK_EQUAL(sides[0].links_down, 1);
  CHECK_EQUAL(sides[0].endpoints[1].channels[WIRE_EAGER].epoch, 1);
  close_pair(sides);
}

static void test_error(void) {
  struct side sides[2];
  open_pair(sides);
  sides[0].transport.can_reconnect = false;
  inject(&sides[0], "error_next=1");
  send_next(&sides[0], &sides[0].endpoints[1].channels[WIRE_EAGER]);
  for (int i = 0; i < 1000 && !sides[0].error; i++) {
    bool progressed;
    transport_poll(&sides[0].transport, &progressed);
  }
  CHECK_EQUAL(sides[0].error, MLXDIST_TRANSPORT);
  CHECK(strstr(mlxdist_last_error(), "the queue pair between rank 0 and rank 1 failed"), "%s", mlxdist_last_error());
  close_pair(sides);
}

/* The reply to a probe came by a link whose port is down since: no link would be left. */
static void test_last_link(void) {
  struct transport transport = {0};
  struct endpoint endpoint = {.transport = &transport, .rank = 1, .channel_count = 4, .dead_links = 2};
  for (uint32_t i = 0; i < 4; i++)
    endpoint.channels[i] = (struct channel){
        .endpoint = &endpoint, .index = i, .sent = WIRE_START + 1, .acked = WIRE_START, .seen_acked = WIRE_START};
  struct wire_header header = {.kind = WIRE_ACK, .flags = WIRE_PROBE_REPLY};
  endpoint.suspects = 1;
  CHECK_EQUAL(failover_on_ack(&endpoint.channels[2], &header), MLXDIST_OK);
  CHECK_EQUAL(endpoint.dead_links, 2);
  endpoint.dead_links = 0;
  endpoint.suspects = 1;
  CHECK_EQUAL(failover_on_ack(&endpoint.channels[2], &header), MLXDIST_OK);
  CHECK_EQUAL(endpoint.dead_links, 1);
}

int main(int argc, char **argv) {
  static const struct check tests[] = {
      {"Messages", test_messages},   {"Faults", test_faults}, {"Credit", test_credit},
      {"Reconnect", test_reconnect}, {"Error", test_error},   {"LastLink", test_last_link},
  };
  simulated_clock_set_reading(20000); /* what a turn without progress takes */
  return check_main(argc, argv, tests, sizeof tests / sizeof *tests);
}
