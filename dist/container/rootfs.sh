#!/bin/sh
# The files of a container that has nothing but dquant: rootfs.sh PROGRAM FOLDER
#
# The program, the shared libraries that ldd names, an account, a folder for temporary files. Names of hosts are resolved by the
# C library itself, without further modules, from glibc 2.34 on.
set -eu
umask 022
program=$1
root=$2

libraries=$(ldd "$program") || { echo "ldd cannot read $program" >&2; exit 1; }
case $libraries in *"not found"*) echo "$libraries" >&2; exit 1 ;; esac

mkdir -p "$root/usr/bin" "$root/etc" "$root/run/dquant-dpu" "$root/var/lib" "$root/proc" "$root/sys" "$root/dev"
mkdir -p "$root/tmp" && chmod 1777 "$root/tmp"
cp "$program" "$root/usr/bin/dquant"
chmod 755 "$root/usr/bin/dquant"

# "libm.so.6 => /lib/x86_64-linux-gnu/libm.so.6 (0x…)" and "/lib64/ld-linux-x86-64.so.2 (0x…)".
echo "$libraries" | awk '$2 == "=>" && $3 ~ /^\// { print $3 } $1 ~ /^\// { print $1 }' | sort -u |
while read -r library; do
    mkdir -p "$root$(dirname "$library")"
    cp -L "$library" "$root$library"
done

# As number and name on the host, if it runs there with --user: the number is what trainers see.
printf 'root:x:0:0:root:/:/bin/false\ndquant:x:4791:4791:dquant:/:/bin/false\n' > "$root/etc/passwd"
printf 'root:x:0:\ndquant:x:4791:\n' > "$root/etc/group"
printf 'hosts: files dns\n' > "$root/etc/nsswitch.conf"
