//! Non-negative least squares: minimise ‖A·x − b‖ over x ≥ 0.
//!
//! The active-set method of Lawson and Hanson (*Solving Least Squares Problems*, 1974, ch. 23).
//! Householder reflections first reduce A and b to a triangle, which changes residuals by a constant only and
//! avoids the squared condition number of normal equations. Columns are scaled to length 1, so one tolerance
//! serves features of any size. The order of evaluation is fixed: equal inputs give equal bits.

use serde::{Deserialize, Serialize};

use super::error::CostError;

/// Sine of the angle to the span of the columns in use below which a column is dependent.
const DEPENDENT: f64 = 1e-10;
/// Gradient that counts as 0, for columns and target of length 1.
const GRADIENT_ZERO: f64 = 1e-12;
/// Maximum changes of the active set per column; a guard against rounding.
const CHANGES_PER_COLUMN_MAX: usize = 64;

/// Reliability of the coefficient of a column, the rate of a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Standing {
    /// Above 0.
    Positive,
    /// 0: a larger value would fit worse.
    Zero,
    /// 0 and unknown: the column is 0 in every row.
    Absent,
    /// 0 and unknown: the column is linearly dependent on columns in use.
    Dependent,
}

/// A dense matrix by columns, all equally long.
type Columns = Vec<Vec<f64>>;

/// Returns the solution and the standing of each column. Deterministic.
///
/// # Errors
/// `Unsettled` if rounding prevents convergence.
pub(crate) fn nnls(
    columns: &Columns,
    target: &[f64],
) -> Result<(Vec<f64>, Vec<Standing>), CostError> {
    let lengths: Vec<f64> = columns.iter().map(|column| norm(column)).collect();
    let target_length = norm(target);
    if target_length == 0.0 {
        return Ok((vec![0.0; columns.len()], vec![Standing::Zero; columns.len()]));
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
    /// Not tried until the active set changes.
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
                // The column is dependent, or its gradient is a rounding error.
                _ => {
                    self.used[entering] = false;
                    self.barred[entering] = true;
                }
            }
        }
        Err(CostError::Unsettled { iterations: limit })
    }

    /// Returns the unused column with the steepest descent, the first of equals.
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

    /// Moves to the trial solution, and drops each column that reaches its bound on the way.
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
            // A subset of independent columns is independent.
            let Some(next) = self.solve_used() else { break };
            trial = next;
        }
        for (j, x) in trial.into_iter().enumerate() {
            self.solution[j] = if self.used[j] { x.max(0.0) } else { 0.0 };
        }
    }

    /// Solves least squares over the columns in use, the others at 0; `None` if they are dependent.
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

    fn standing(&mut self, j: usize, length: f64) -> Standing {
        if length == 0.0 {
            return Standing::Absent;
        }
        if self.used[j] {
            return Standing::Positive;
        }
        self.used[j] = true;
        let dependent = self.solve_used().is_none();
        self.used[j] = false;
        if dependent { Standing::Dependent } else { Standing::Zero }
    }
}

/// Applies Householder reflections to the columns and the target, and returns them without the zero rows
/// below the triangle.
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
