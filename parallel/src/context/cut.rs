//! Cuts a packed row into chunks and assigns them to ranks.

use super::{
    CHUNKS_MAX, CONTEXT_RANKS_MAX, ContextError, Shard, ShardCut, ShardOptions, ShardRun, Shards,
};
use dormouse_schedule::layout::{MULTIPLE_MAX, Piece, check_pieces};
use dormouse_schedule::{Span, TOKENS_MAX, check_range};

impl ShardCut {
    fn chunks(self) -> u32 {
        match self {
            Self::Contiguous => 1,
            Self::Zigzag => 2,
            Self::Balanced { chunks } => chunks,
        }
    }
}

impl Shards {
    /// Returns empty shards: the prefix of a microbatch that reads none.
    ///
    /// # Errors
    /// [`ContextError::Count`] if `ranks` is out of range.
    pub fn none(ranks: u32) -> Result<Self, ContextError> {
        check_range("context ranks", ranks, 1, CONTEXT_RANKS_MAX)?;
        let ranks = vec![Shard::default(); ranks as usize];
        Ok(Self { ranks, imbalance: 1.0, ..Self::default() })
    }

    /// Cuts the packed row of a prefix or of a microbatch's suffixes.
    ///
    /// # Errors
    /// [`ContextError`] for no pieces, more than [`TOKENS_MAX`] rows, or options out of range.
    pub fn of(pieces: &[Piece], options: &ShardOptions) -> Result<Self, ContextError> {
        let rows = check_pieces(pieces, TOKENS_MAX)?;
        check_range("context ranks", options.ranks, 1, CONTEXT_RANKS_MAX)?;
        check_range("multiple", options.multiple, 1, MULTIPLE_MAX)?;
        if let ShardCut::Balanced { chunks } = options.cut {
            check_range("chunks", chunks, 2, CHUNKS_MAX)?;
        }
        let chunks = u64::from(options.cut.chunks());
        let slots = u64::from(options.ranks) * chunks;
        let chunk_rows = rows.div_ceil(slots).next_multiple_of(options.multiple.into());
        let cut = cut(pieces, chunk_rows, slots);
        let mut shards = Self { rank_rows: chunks * chunk_rows, rows, ..Self::default() };
        shards.ranks.resize(options.ranks as usize, Shard::default());
        for (rank, runs) in owners(&cut, options).into_iter().zip(cut) {
            shards.ranks[rank].take(runs);
        }
        for shard in &mut shards.ranks {
            shard.padding_rows = shards.rank_rows - shard.rows;
        }
        let pairs: Vec<u64> = shards.ranks.iter().map(|shard| shard.pairs).collect();
        let most = pairs.iter().max().copied().unwrap_or(0);
        // Not 0: every row sees itself.
        shards.imbalance = most as f64 * pairs.len() as f64 / pairs.iter().sum::<u64>() as f64;
        Ok(shards)
    }
}

impl Shard {
    /// Appends a chunk's runs, merging a run that continues the last one.
    fn take(&mut self, runs: Vec<ShardRun>) {
        for mut run in runs {
            run.local = Span { begin: self.rows, end: self.rows + run.rows.count() };
            self.rows += run.rows.count();
            self.pairs += run.pairs();
            match self.runs.last_mut() {
                Some(last) if last.piece == run.piece && last.rows.end == run.rows.begin => {
                    last.rows.end = run.rows.end;
                    last.local.end = run.local.end;
                    last.positions.end = run.positions.end;
                    last.own_keys = run.own_keys;
                }
                _ => self.runs.push(run),
            }
        }
    }
}

impl ShardRun {
    /// Returns the query–key pairs: a row at position p sees p + 1 keys. At most 2^57.
    fn pairs(&self) -> u64 {
        (self.positions.begin + self.positions.end + 1) * self.rows.count() / 2
    }
}

/// Returns the runs of each chunk; chunks after the last row are empty.
fn cut(pieces: &[Piece], chunk_rows: u64, slots: u64) -> Vec<Vec<ShardRun>> {
    let mut chunks: Vec<Vec<ShardRun>> = (0..slots).map(|_| Vec::new()).collect();
    let mut row = 0;
    for (number, piece) in (0_u32..).zip(pieces) {
        let begin = row;
        while row < begin + piece.rows {
            let chunk = row / chunk_rows;
            let end = (begin + piece.rows).min((chunk + 1) * chunk_rows);
            let first = piece.first_position + row - begin;
            chunks[chunk as usize].push(ShardRun {
                piece: number,
                rows: Span { begin: row, end },
                local: Span::default(),
                positions: Span { begin: first, end: first + end - row },
                own_keys: end - begin,
            });
            row = end;
        }
    }
    chunks
}

/// Returns the rank of each chunk.
fn owners(chunks: &[Vec<ShardRun>], options: &ShardOptions) -> Vec<usize> {
    let ranks = options.ranks as usize;
    match options.cut {
        ShardCut::Contiguous => (0..ranks).collect(),
        ShardCut::Zigzag => (0..ranks).chain((0..ranks).rev()).collect(),
        ShardCut::Balanced { .. } => {
            let pairs: Vec<u64> =
                chunks.iter().map(|runs| runs.iter().map(ShardRun::pairs).sum()).collect();
            deal(&pairs, ranks)
        }
    }
}

/// Deals chunks in rounds of one per rank: in each, the chunk with the most pairs goes to the rank with the
/// fewest so far. Later rounds differ less and even out earlier ones.
fn deal(pairs: &[u64], ranks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..pairs.len()).collect();
    order.sort_unstable_by_key(|&chunk| (std::cmp::Reverse(pairs[chunk]), chunk));
    let mut loads: Vec<u64> = vec![0; ranks];
    let mut owners = vec![0; pairs.len()];
    for round in order.chunks(ranks) {
        let mut free: Vec<usize> = (0..ranks).collect();
        free.sort_unstable_by_key(|&rank| (loads[rank], rank));
        for (&chunk, rank) in round.iter().zip(free) {
            owners[chunk] = rank;
            loads[rank] += pairs[chunk];
        }
    }
    owners
}
