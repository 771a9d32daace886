#!/usr/bin/env bash
# tools/aarch64/make_root.sh FOLDER: Debian's Python for 64-bit Arm with its libraries, unpacked into FOLDER and not configured: what
# qemu-aarch64 takes as its -L. Needs root, debootstrap and a mirror of Debian.
set -euo pipefail
root=$1
debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,libgomp1,libstdc++6,ca-certificates bookworm "$root.part" \
  http://deb.debian.org/debian >"$root.log"
for package in "$root.part"/var/cache/apt/archives/*.deb; do
  dpkg-deb --fsys-tarfile "$package" | tar x --keep-directory-symlink -C "$root.part"
done
rm "$root.part"/var/cache/apt/archives/*.deb
# debootstrap leaves the host's here, as a link.
for folder in proc sys; do
  [[ ! -L $root.part/$folder ]] || rm "$root.part/$folder"
  ! mountpoint -q "$root.part/$folder" || umount "$root.part/$folder"
  mkdir -p "$root.part/$folder"
done
# What libraries ask of the machine before anything else: qemu-user shows them the processor of the host.
for processor in 0 1; do
  folder=$root.part/sys/devices/system/cpu/cpu$processor/regs/identification
  mkdir -p "$folder"
  echo 0x00000000410fd083 >"$folder/midr_el1"
  cat <<END
processor	: $processor
BogoMIPS	: 50.00
Features	: fp asimd evtstrm aes pmull sha1 sha2 crc32 cpuid
CPU implementer	: 0x41
CPU architecture: 8
CPU variant	: 0x0
CPU part	: 0xd08
CPU revision	: 3

END
done >"$root.part/proc/cpuinfo"
mv "$root.part" "$root"
