/* One of two hosts that send each other a stream of messages by TCP, for tests/hosts/test_between_hosts.py. Arguments:
 * an address of this host, and the number of messages. What it prints is meant for the other's input, line by line. */
#define _GNU_SOURCE 1
#include "soft_stream.h"
#include "tcp_pair.h"

static struct side_address exchange(const struct side *side) {
  struct side_address own = side_address(side), peer;
  char line[2 * sizeof peer + 2];
  for (size_t i = 0; i < sizeof own; i++) printf("%02x", ((unsigned char *)&own)[i]);
  printf("\n");
  fflush(stdout);
  CHECK(fgets(line, sizeof line, stdin), "the other host is gone");
  for (size_t i = 0; i < sizeof peer; i++) CHECK_EQUAL(sscanf(line + 2 * i, "%2hhx", (unsigned char *)&peer + i), 1);
  return peer;
}

int main(int argc, char **argv) {
  CHECK_EQUAL(argc, 3);
  struct side side;
  struct side_options options = STREAM_OPTIONS;
  options.key = tcp_key;
  options.address = argv[1];
  side_open(&side, options);
  struct side_address peer = exchange(&side);
  peer.gid_index = side.gid_index; /* each has a table of its own */
  side_to_rts(side.qp, peer);
  stream_prepare(&side);
  exchange(&side); /* a barrier: the peer's receives are posted */
  stream_run(&side, (uint32_t)atoi(argv[2]));
  exchange(&side); /* the peer has everything */
  side_close(&side);
  return 0;
}
