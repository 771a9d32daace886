#!/bin/bash -eu
# What OSS-Fuzz runs in its container: $CXX, $CXXFLAGS and $LIB_FUZZING_ENGINE are its, targets with their seeds go to $OUT.
cmake -S "$SRC/monograph" -B "$WORK/build" -G Ninja -DCMAKE_BUILD_TYPE=None -DCMAKE_CXX_COMPILER="$CXX" \
  -DCMAKE_CXX_FLAGS="$CXXFLAGS" -DMONOGRAPH_BUILD_FUZZ=ON -DMONOGRAPH_PRECOMPILE=OFF -DMONOGRAPH_INSTALL=OFF \
  -DMONOGRAPH_FUZZ_ENGINE="$LIB_FUZZING_ENGINE"
cmake --build "$WORK/build"
seeds=$SRC/monograph/tests/files/fuzz
find "$WORK/build" -type f -name 'fuzz_*' -perm -100 | while read -r target; do
  name=$(basename "$target")
  cp "$target" "$OUT/$name"
  cp "$seeds/json.dict" "$OUT/$name.dict"
  if [ -d "$seeds/${name#fuzz_}" ]; then
    python3 -m zipfile -c "$OUT/${name}_seed_corpus.zip" "$seeds/${name#fuzz_}"/*
  fi
done
