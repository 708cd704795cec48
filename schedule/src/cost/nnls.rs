//! Non-negative least squares: minimise ‖A·x − b‖ over x ≥ 0.
//!
//! The active-set method of Lawson and Hanson (*Solving Least Squares Problems*, 1974, ch. 23).
//! Householder reflections first bring A and b to a triangle no taller than A is wide; that keeps
//! every residual but for a constant, and spares the squared condition of normal equations. Columns
//! are scaled to length 1, so one tolerance serves features of any size. No step depends on order
//! of evaluation: equal inputs give equal bits.

use super::CostError;

/// A column this near (as the sine of the angle) to the span of those in use adds nothing.
const DEPENDENT: f64 = 1e-10;
/// A gradient this small, beside columns and target of length 1, is 0.
const GRADIENT_ZERO: f64 = 1e-12;
/// Changes of the active set for each column. The method ends by itself; rounding might not.
const CHANGES_PER_COLUMN_MAX: usize = 64;

/// What became of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Column {
    /// In use, with a coefficient above 0.
    Positive,
    /// At 0: more of it would fit worse.
    Zero,
    /// At 0: it is 0 in every row.
    Absent,
    /// At 0: those in use already say all it could.
    Dependent,
}

/// A dense matrix by columns, all equally long.
type Columns = Vec<Vec<f64>>;

/// The least-squares solution and what became of each column. Deterministic.
///
/// # Errors
/// `Unsettled` where rounding keeps the active set from settling.
pub(crate) fn nnls(
    columns: &Columns,
    target: &[f64],
) -> Result<(Vec<f64>, Vec<Column>), CostError> {
    let lengths: Vec<f64> = columns.iter().map(|column| norm(column)).collect();
    let target_length = norm(target);
    if target_length == 0.0 {
        return Ok((vec![0.0; columns.len()], vec![Column::Zero; columns.len()]));
    }
    let scaled = columns.iter().zip(&lengths).map(|(column, length)| scale(column, *length));
    let (triangle, rest) = triangulate(scaled.collect(), scale(target, target_length));
    let mut search = Search {
        columns: triangle,
        target: rest,
        solution: vec![0.0; columns.len()],
        used: vec![false; columns.len()],
        barred: lengths.iter().map(|length| *length == 0.0).collect(),
    };
    search.run()?;
    let standing = (0..columns.len()).map(|j| search.standing(j, lengths[j])).collect();
    let rescale = |(x, length): (f64, &f64)| if x > 0.0 { x * target_length / length } else { 0.0 };
    let solution = search.solution.iter().copied().zip(&lengths).map(rescale).collect();
    Ok((solution, standing))
}

#[derive(Debug)]
struct Search {
    columns: Columns,
    target: Vec<f64>,
    solution: Vec<f64>,
    used: Vec<bool>,
    /// Not to be tried until the active set has changed.
    barred: Vec<bool>,
}

impl Search {
    fn run(&mut self) -> Result<(), CostError> {
        let absent = self.barred.clone();
        let limit = CHANGES_PER_COLUMN_MAX * self.columns.len();
        for _ in 0..limit {
            let Some(entering) = self.steepest() else { return Ok(()) };
            self.used[entering] = true;
            match self.solve_used() {
                Some(trial) if trial[entering] > 0.0 => {
                    self.step_toward(trial);
                    self.barred.clone_from(&absent);
                }
                // Dependent on the others, or its gradient was rounding.
                _ => {
                    self.used[entering] = false;
                    self.barred[entering] = true;
                }
            }
        }
        Err(CostError::Unsettled { iterations: limit })
    }

    /// The unused column whose increase lowers the residual most; the first of equals.
    fn steepest(&self) -> Option<usize> {
        let residual = self.residual();
        let mut best = None;
        let mut steepest = GRADIENT_ZERO;
        for (j, column) in self.columns.iter().enumerate() {
            let gradient = dot(column, &residual);
            if !self.used[j] && !self.barred[j] && gradient > steepest {
                (best, steepest) = (Some(j), gradient);
            }
        }
        best
    }

    /// Moves to the trial solution, stopping at each bound on the way and leaving that column out.
    fn step_toward(&mut self, mut trial: Vec<f64>) {
        loop {
            let crossing = |j: &usize| self.used[*j] && trial[*j] <= 0.0;
            let step = |j: usize| match self.solution[j] {
                0.0 => 0.0,
                from => from / (from - trial[j]),
            };
            let first = (0..trial.len()).filter(crossing).map(|j| (step(j), j));
            let Some((step, leaving)) = first.min_by(|a, b| a.0.total_cmp(&b.0)) else { break };
            for (x, wanted) in self.solution.iter_mut().zip(&trial) {
                *x += step * (wanted - *x);
            }
            self.solution[leaving] = 0.0;
            self.used[leaving] = false;
            // Fewer columns of an independent set are independent.
            let Some(next) = self.solve_used() else { break };
            trial = next;
        }
        for (j, x) in trial.into_iter().enumerate() {
            self.solution[j] = if self.used[j] { x.max(0.0) } else { 0.0 };
        }
    }

    /// Least squares over the columns in use, the others at 0; `None` where they are dependent.
    fn solve_used(&self) -> Option<Vec<f64>> {
        let used: Vec<usize> = (0..self.used.len()).filter(|j| self.used[*j]).collect();
        if used.len() > self.target.len() {
            return None;
        }
        let chosen = used.iter().map(|j| self.columns[*j].clone()).collect();
        let (triangle, rest) = triangulate(chosen, self.target.clone());
        let mut solution = vec![0.0; self.used.len()];
        for (row, j) in used.iter().enumerate().rev() {
            let pivot = triangle[row][row];
            if pivot.abs() <= DEPENDENT {
                return None;
            }
            let later = (row + 1..used.len()).map(|k| triangle[k][row] * solution[used[k]]);
            solution[*j] = (rest[row] - later.sum::<f64>()) / pivot;
        }
        Some(solution)
    }

    fn residual(&self) -> Vec<f64> {
        let mut residual = self.target.clone();
        for (column, x) in self.columns.iter().zip(&self.solution) {
            for (r, a) in residual.iter_mut().zip(column) {
                *r -= a * x;
            }
        }
        residual
    }

    fn standing(&mut self, j: usize, length: f64) -> Column {
        if length == 0.0 {
            return Column::Absent;
        }
        if self.used[j] {
            return Column::Positive;
        }
        self.used[j] = true;
        let dependent = self.solve_used().is_none();
        self.used[j] = false;
        if dependent { Column::Dependent } else { Column::Zero }
    }
}

/// Householder reflections: the upper triangle of the columns, and the target reflected alike. Rows
/// below the triangle, where every column is 0, are cut off.
fn triangulate(mut columns: Columns, mut target: Vec<f64>) -> (Columns, Vec<f64>) {
    let rows = columns.len().min(target.len());
    for k in 0..rows {
        let mut mirror = columns[k][k..].to_vec();
        let length = norm(&mirror);
        if length == 0.0 {
            continue;
        }
        mirror[0] += length.copysign(mirror[0]);
        let half = dot(&mirror, &mirror) / 2.0;
        for column in columns[k..].iter_mut().chain([&mut target]) {
            let factor = dot(&mirror, &column[k..]) / half;
            for (a, m) in column[k..].iter_mut().zip(&mirror) {
                *a -= factor * m;
            }
        }
        columns[k][k + 1..].fill(0.0);
    }
    for column in columns.iter_mut().chain([&mut target]) {
        column.truncate(rows);
    }
    (columns, target)
}

fn scale(vector: &[f64], length: f64) -> Vec<f64> {
    let length = if length > 0.0 { length } else { 1.0 };
    vector.iter().map(|a| a / length).collect()
}

fn norm(vector: &[f64]) -> f64 {
    dot(vector, vector).sqrt()
}

fn dot(left: &[f64], right: &[f64]) -> f64 {
    left.iter().zip(right).map(|(a, b)| a * b).sum()
}
