#!/bin/bash
# systemd as process 1 over a copy of this machine's files that is thrown away: boot.sh FOLDER
#
# Called by running.py in new namespaces of mounts, processes, host names, IPC, control groups and the network. The
# machine's own services do not start: the target `trial` needs nothing but `basic`. What would touch hardware or the kernel
# is masked, and /sys and /proc/sys are read-only. FOLDER/given is there as /given.
set -e
folder=$1
root=$folder/root
mount --make-rprivate /
mkdir -p "$folder/upper" "$folder/work" "$root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$root"
mount -t proc proc "$root/proc"
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
if [ -e /sys/fs/cgroup/cgroup.controllers ]; then
    mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
else
    mount -t tmpfs tmpfs "$root/sys/fs/cgroup"
    mkdir "$root/sys/fs/cgroup/systemd"
    mount -t cgroup -o none,name=systemd cgroup "$root/sys/fs/cgroup/systemd"
fi
mount -t tmpfs -o mode=755 tmpfs "$root/dev"
for device in null zero full random urandom tty; do
    touch "$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
done
mkdir "$root/dev/shm" "$root/dev/pts" "$root/dev/mqueue" "$root/dev/hugepages"
mount -t tmpfs tmpfs "$root/dev/shm"
mount -t devpts devpts "$root/dev/pts"
ln -s pts/ptmx "$root/dev/ptmx"
ln -s /proc/self/fd "$root/dev/fd"
touch "$root/dev/console"
mount -t tmpfs -o mode=755 tmpfs "$root/run"
mount -t tmpfs tmpfs "$root/tmp"
ip link set lo up

units=$root/etc/systemd/system
printf '[Unit]\nDescription=Trial\nRequires=basic.target\nAfter=basic.target\n' > "$units/trial.target"
for unit in dev-hugepages.mount dev-mqueue.mount getty.target kmod-static-nodes.service network-online.target \
    proc-sys-fs-binfmt_misc.automount sys-fs-fuse-connections.mount sys-kernel-debug.mount sys-kernel-tracing.mount \
    systemd-hwdb-update.service systemd-logind.service systemd-modules-load.service systemd-networkd.service \
    systemd-pstore.service systemd-random-seed.service systemd-remount-fs.service systemd-resolved.service \
    systemd-sysctl.service systemd-timesyncd.service systemd-tmpfiles-setup-dev.service systemd-udev-trigger.service \
    systemd-udevd-control.socket systemd-udevd-kernel.socket systemd-udevd.service; do
    ln -sf /dev/null "$units/$unit"
done
: > "$root/etc/fstab"
cp -r "$folder/given" "$root/given"

# Not chroot: a process in one may not make user namespaces. Shared, because credentials of services are mounts.
mkdir -p "$root/old"
cd "$root"
pivot_root . old
umount -l /old
mount --make-rshared /
exec env -i container=other PATH=/usr/sbin:/usr/bin:/sbin:/bin \
    setpriv --bounding-set -sys_module,-sys_time,-sys_rawio,-sys_boot,-syslog \
    /lib/systemd/systemd --system --unit=trial.target --show-status=false --log-target=journal
