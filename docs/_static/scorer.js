// Scores of the search: titles of pages before names of the reference, which Sphinx ranks first.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 60,
  partialTitle: 20,
  term: 5,
  partialTerm: 2,
};
