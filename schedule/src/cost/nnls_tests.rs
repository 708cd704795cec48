//! Non-negative least squares against every subset of columns, and its optimality conditions.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;

use super::nnls::{Standing, nnls};

/// Normal equations by Gauss–Jordan with full pivoting: a method other than the code's. `None` if
/// the columns are dependent.
fn least_squares(columns: &[&Vec<f64>], target: &[f64]) -> Option<Vec<f64>> {
    let n = columns.len();
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    let mut table: Vec<Vec<f64>> = (0..n)
        .map(|i| {
            let row = columns.iter().map(|column| dot(columns[i], column));
            row.chain([dot(columns[i], target)]).collect()
        })
        .collect();
    let largest = table.iter().flatten().fold(0.0_f64, |a, b| a.max(b.abs()));
    for k in 0..n {
        let pivot = (k..n).max_by(|a, b| table[*a][k].abs().total_cmp(&table[*b][k].abs()))?;
        table.swap(k, pivot);
        if table[k][k].abs() < 1e-11 * largest {
            return None;
        }
        let row = table[k].clone();
        for (i, other) in table.iter_mut().enumerate().filter(|(i, _)| *i != k) {
            let _ = i;
            let factor = other[k] / row[k];
            other.iter_mut().zip(&row).for_each(|(a, b)| *a -= factor * b);
        }
    }
    Some((0..n).map(|k| table[k][n] / table[k][k]).collect())
}

fn squared_residual(columns: &[Vec<f64>], target: &[f64], x: &[f64]) -> f64 {
    let mut sum = 0.0;
    for (row, wanted) in target.iter().enumerate() {
        let got: f64 = columns.iter().zip(x).map(|(column, x)| column[row] * x).sum();
        sum += (got - wanted).powi(2);
    }
    sum
}

/// The best over all subsets whose unconstrained optimum happens to be non-negative: the optimum of
/// the constrained problem is among them.
fn brute_force(columns: &[Vec<f64>], target: &[f64]) -> f64 {
    let n = columns.len();
    let mut best = squared_residual(columns, target, &vec![0.0; n]);
    for subset in 1_u32..1 << n {
        let used: Vec<usize> = (0..n).filter(|j| subset >> j & 1 == 1).collect();
        let chosen: Vec<&Vec<f64>> = used.iter().map(|j| &columns[*j]).collect();
        let Some(part) = least_squares(&chosen, target) else { continue };
        if part.iter().all(|x| *x >= 0.0) {
            let mut x = vec![0.0; n];
            used.iter().zip(part).for_each(|(j, value)| x[*j] = value);
            best = best.min(squared_residual(columns, target, &x));
        }
    }
    best
}

/// Small whole numbers make exact collinearity, zero columns and ties common.
fn problem() -> impl Strategy<Value = (Vec<Vec<f64>>, Vec<f64>)> {
    (1_usize..=6, 1_usize..=8).prop_flat_map(|(n, m)| {
        let numbers = |low: i32| prop::collection::vec(low..=4_i32, m);
        let column = (numbers(-2), -3..6_i32).prop_map(|(column, power)| {
            column.into_iter().map(|a| f64::from(a) * 10_f64.powi(power)).collect::<Vec<f64>>()
        });
        let target = numbers(-3).prop_map(|b| b.into_iter().map(f64::from).collect::<Vec<f64>>());
        (prop::collection::vec(column, n), target)
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_subset_of_columns_fits_better((columns, target) in problem()) {
        let (x, standing) = nnls(&columns, &target).unwrap();
        prop_assert!(x.iter().all(|x| *x >= 0.0 && x.is_finite()), "{:?}", x);
        let (got, best) = (squared_residual(&columns, &target, &x), brute_force(&columns, &target));
        prop_assert!(got <= best + 1e-9, "{} above {}", got, best);
        for (j, column) in columns.iter().enumerate() {
            prop_assert_eq!(standing[j] == Standing::Positive, x[j] > 0.0);
            let zero = column.iter().all(|a| *a == 0.0) && target.iter().any(|b| *b != 0.0);
            prop_assert_eq!(standing[j] == Standing::Absent, zero);
        }
    }

    /// Karush–Kuhn–Tucker: no gradient points into the region, and none is left where x > 0.
    #[test]
    fn the_gradient_vanishes_at_positive_coefficients((columns, target) in problem()) {
        let (x, _) = nnls(&columns, &target).unwrap();
        let residual: Vec<f64> = (0..target.len())
            .map(|row| target[row] - columns.iter().zip(&x).map(|(c, x)| c[row] * x).sum::<f64>())
            .collect();
        for (column, x) in columns.iter().zip(&x) {
            let length = column.iter().map(|a| a * a).sum::<f64>().sqrt().max(1e-300);
            let gradient = column.iter().zip(&residual).map(|(a, r)| a * r).sum::<f64>() / length;
            prop_assert!(gradient < 1e-9, "{} at {}", gradient, x);
            prop_assert!(*x == 0.0 || gradient > -1e-9, "{} at {}", gradient, x);
        }
    }
}

/// Columns 1e-11 apart: once the third is in use, the second still promises a little, and only a
/// coefficient of 1e11 would keep the promise. It is left out, and the search goes on without it.
#[test]
fn nearly_equal_columns_are_dependent() {
    let columns = vec![vec![1.0, 0.0, 0.0], vec![1.0, 1e-11, 0.0], vec![0.0, -1.0, 1.0]];
    let (x, standing) = nnls(&columns, &[2.0, -0.5, 2.0]).unwrap();
    let near = |a: f64, b: f64| (a - b).abs() < 1e-12;
    assert!(near(x[0], 2.0) && x[1] == 0.0 && near(x[2], 1.25), "{x:?}");
    assert_eq!(standing, [Standing::Positive, Standing::Dependent, Standing::Positive]);
}

#[test]
fn equal_columns_are_dependent() {
    let column = vec![1.0, 2.0, 3.0];
    let (x, standing) = nnls(&vec![column.clone(), column.clone(), vec![0.0; 3]], &column).unwrap();
    assert!((x[0] - 1.0).abs() < 1e-12 && x[1] == 0.0 && x[2] == 0.0, "{x:?}");
    assert_eq!(standing, [Standing::Positive, Standing::Dependent, Standing::Absent]);
}
