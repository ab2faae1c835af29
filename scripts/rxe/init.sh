#!/bin/sh
# The first process of the virtual machine: loads modules, mounts this machine's root read-only below a layer of memory,
# makes the network and its soft-RoCE devices, then carries out commands until the other side hangs up.
/bin/busybox --install -s /bin
export PATH=/bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs dev /dev

fail() {
  echo "init: $*" >/dev/ttyS0
  poweroff -f
  sleep 60
}

while read -r module; do
  insmod "/modules/$module" 2>/dev/ttyS0 || fail "cannot load $module"
done </modules/order

plan9=trans=virtio,version=9p2000.L,msize=1048576
mount -t 9p -o $plan9,cache=loose,ro root /lower || fail "cannot mount the root of the host"
mount -t tmpfs tmpfs /upper
mkdir /upper/files /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/files,workdir=/upper/work overlay /root ||
  fail "cannot mount an overlay"
mount -t devtmpfs dev /root/dev
mkdir -p /root/dev/pts /root/dev/shm /root/exchange
mount -t devpts devpts /root/dev/pts
mount -t tmpfs tmpfs /root/dev/shm
mount -t tmpfs tmpfs /root/run
mount -t proc proc /root/proc
mount -t sysfs sysfs /root/sys
mount -t 9p -o $plan9,cache=none,access=any exchange /root/exchange || fail "cannot mount the directory for results"

hostname rxe
# shellcheck disable=SC3045  # busybox has it
ulimit -l unlimited
# Folders in which the host writes meanwhile are not for the machine: an overlay does not allow for that.
mkdir /root/run/home /root/run/temporary
in_root() {
  chroot /root /usr/bin/env -i PATH=/usr/local/bin:/usr/sbin:/usr/bin HOME=/run/home TMPDIR=/run/temporary \
    LANG=C.UTF-8 TERM=dumb "$@"
}
in_root /bin/bash /exchange/network.sh >/dev/ttyS0 2>&1 || fail "the network could not be made"
for port in /sys/class/virtio-ports/*; do
  [ "$(cat "$port/name")" = control ] && in_root /bin/bash /exchange/commands.sh "/dev/${port##*/}" 2>/dev/ttyS0
done
poweroff -f
