# shellcheck shell=bash
# Two soft-RoCE devices, rxe0 (10.0.0.1) and rxe1 (10.0.0.2), on the two ends of a veth pair, in one network namespace:
# the rxe of Linux 6.1 listens in the first namespace only, and in others a device looks well and carries nothing.
set -eu
# A packet of RoCE with 4096 bytes of payload, and its headers, in one packet of Ethernet.
mtu=4200
# A burst of a large message must fit: what overflows here is lost to UC for good.
echo 100000 >/proc/sys/net/core/netdev_max_backlog
for file in rmem_max wmem_max rmem_default wmem_default; do echo 16777216 >/proc/sys/net/core/$file; done

ip link set lo up
ip link add veth0 mtu $mtu address 02:00:00:00:00:01 type veth peer name veth1 mtu $mtu address 02:00:00:00:00:02
echo 0 >/proc/sys/net/ipv4/conf/all/rp_filter
for end in 0 1; do
  # Each end takes packets from an address that is this machine's own, too.
  echo 1 >/proc/sys/net/ipv4/conf/veth$end/accept_local
  echo 0 >/proc/sys/net/ipv4/conf/veth$end/rp_filter
  echo 1 >/proc/sys/net/ipv6/conf/veth$end/disable_ipv6
done

# Both addresses are local, so the kernel would send from one to the other over lo, where rxe drops what it gets. The
# local table is moved behind rules that send such packets over the pair.
ip -batch - <<END
addr add 10.0.0.1/32 dev veth0
addr add 10.0.0.2/32 dev veth1
link set veth0 up
link set veth1 up
neigh replace 10.0.0.2 lladdr 02:00:00:00:00:02 dev veth0 nud permanent
neigh replace 10.0.0.1 lladdr 02:00:00:00:00:01 dev veth1 nud permanent
route add 10.0.0.2/32 dev veth0 scope link src 10.0.0.1 table 101
route add 10.0.0.1/32 dev veth1 scope link src 10.0.0.2 table 102
rule add pref 1 iif veth0 lookup local
rule add pref 1 iif veth1 lookup local
rule add pref 2 from 10.0.0.1 to 10.0.0.2 lookup 101
rule add pref 2 from 10.0.0.2 to 10.0.0.1 lookup 102
rule add pref 3 lookup local
rule del pref 0
END

rdma link add rxe0 type rxe netdev veth0
rdma link add rxe1 type rxe netdev veth1
