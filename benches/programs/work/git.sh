# A generated history: packed, checked, cloned. Dates are fixed, so hashes are equal.
export GIT_AUTHOR_DATE="2020-01-01T00:00:00Z" GIT_COMMITTER_DATE="2020-01-01T00:00:00Z"
export GIT_CONFIG_GLOBAL=/dev/null GIT_CONFIG_NOSYSTEM=1
export GIT_AUTHOR_NAME=a GIT_AUTHOR_EMAIL=a@b GIT_COMMITTER_NAME=a GIT_COMMITTER_EMAIL=a@b
git init -q repo
cd repo
for turn in 1 2 3 4 5; do
    for file in $(seq 100); do seq $((file * turn)) $((file * turn + 2000)) > "f$file"; done
    git add .
    git commit -q -m "turn $turn"
done
git gc -q --aggressive
git fsck --full --no-progress
cd ..
git clone -q --no-local repo copy
git -C copy log --format=%H
git -C copy diff HEAD~3 | sha256sum
