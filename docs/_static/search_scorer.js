// What a search shows first: guides, then lists and answers, then the reference of the API.
var Scorer = {
  // item: [docname, title, anchor, description, score, filename, kind]
  score: (item) => {
    const [docname, , , , score] = item;
    const words = (new URLSearchParams(window.location.search).get("q") || "").trim().toLowerCase().replace(/ +/g, "-");
    if (docname === words || docname === `${words}s`) return score + 10;
    if (docname.startsWith("api/")) return score - 1000;
    const lists = ["bridge-classes", "changelog", "faq", "gallery", "glossary", "map", "plugins", "public-names"];
    return lists.includes(docname) ? score - 100 : score;
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
